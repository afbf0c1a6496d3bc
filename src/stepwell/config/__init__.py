"""The settings tree: one module per subject."""
