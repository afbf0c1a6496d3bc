"""Anthropic's form of requests and answers, translated from and to chat's. Nothing here knows HTTP or an engine."""
