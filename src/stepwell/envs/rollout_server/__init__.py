"""The client of a rollout server with Atropos' API."""
