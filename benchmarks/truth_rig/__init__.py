"""Policies of which everything can be counted, their rollouts in a real pool, and the gradients of trainers."""
