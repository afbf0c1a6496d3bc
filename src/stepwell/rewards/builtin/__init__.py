"""The reward functions that come with Stepwell; functions.py lists them."""
