"""Attackers, and a gateway without bounds."""
