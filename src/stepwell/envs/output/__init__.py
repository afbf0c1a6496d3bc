"""The outputs of an environment: files, an HTML page, Weights & Biases."""
