"""A package, so that the engine that its tests share ends with the last of them."""
