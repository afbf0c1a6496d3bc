"""What the benchmark of trainers is made of."""
