"""Reward functions in processes that can be killed."""
