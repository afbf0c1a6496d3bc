"""What the learning benchmark is made of."""
