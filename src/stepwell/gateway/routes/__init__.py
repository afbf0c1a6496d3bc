"""The ASGI front, keys, and the routes that are not dialects."""
