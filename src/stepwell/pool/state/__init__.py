"""What a shard of the pool holds, and the one object that changes it. Pure: no clock, no I/O."""
