"""The Atropos-compatible server."""
