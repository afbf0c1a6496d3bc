"""Trainers: what consumes batches, and what brings the new weights back to the engines."""
