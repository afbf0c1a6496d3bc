"""The dashboard's own list of trajectories and texts."""
