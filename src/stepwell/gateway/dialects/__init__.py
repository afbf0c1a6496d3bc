"""One file per API dialect."""
