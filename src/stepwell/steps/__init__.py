"""The record of a model call, and its forms: columns, Arrow, JSON lines, rows for training."""
