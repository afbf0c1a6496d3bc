"""The reward functions that come with Stepwell; `table` lists them."""
