"""The way to an Atropos-compatible server."""
