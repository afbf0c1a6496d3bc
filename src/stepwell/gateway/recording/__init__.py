"""Recording: from a sampled answer to a step in the pool."""
