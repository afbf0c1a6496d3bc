"""Trainers consume batches and bring new weights to the engines."""
