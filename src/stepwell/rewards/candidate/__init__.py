"""The programs that run inside a sandbox: they import only Python's own library and one another."""
