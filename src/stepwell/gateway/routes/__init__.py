"""The routes that are not dialects, served by FastAPI."""
