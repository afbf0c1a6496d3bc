"""Agents make rollouts. They reach a gateway over HTTP, and no other part of Stepwell."""
