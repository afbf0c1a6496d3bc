"""Rewards: the way to a reward worker."""
