"""What a pool holds or has archived, out to files that other tools read, and back."""
