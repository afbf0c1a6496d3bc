"""The rules, as plain objects: no Ray, no HTTP, no clock, no waiting. Standard library and numpy only."""
