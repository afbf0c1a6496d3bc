"""Programs that run in another trainer's environment."""
