"""One shard of the pool as a service, as a Ray actor, and its files."""
