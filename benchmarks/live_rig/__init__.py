"""What the benchmark of live sessions is made of."""
