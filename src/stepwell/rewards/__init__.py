"""Rewards: functions that say how well a rollout went, and the workers that run them."""
