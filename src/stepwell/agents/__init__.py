"""Agents: what makes rollouts. They reach a gateway over HTTP, and nothing else of Stepwell's."""
