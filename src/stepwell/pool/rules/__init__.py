"""What the pool decides. Pure: no clock, no I/O."""
