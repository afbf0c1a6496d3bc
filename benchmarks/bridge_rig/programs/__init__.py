"""Programs that run in another project's environment."""
