"""Exports of what a pool holds or has archived, to files that other tools read, and back."""
