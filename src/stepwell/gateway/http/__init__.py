"""Requests and responses, below the calls."""
