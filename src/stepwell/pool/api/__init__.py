"""What the pool is asked and what it answers: the only part of the pool that other rooms import."""
