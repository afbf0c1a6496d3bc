"""Hostile requests for every HTTP surface: made up from a seed, sent over plain sockets, and every answer judged."""
