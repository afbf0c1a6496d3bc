"""What an environment writes: files, an HTML page, Weights & Biases."""
