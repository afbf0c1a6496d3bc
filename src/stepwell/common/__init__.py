"""Helpers that know nothing of steps or pools; at least two rooms use each."""
