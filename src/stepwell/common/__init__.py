"""Helpers that know nothing of steps or pools; at least two packages use each."""
