"""Stepwell: the pool of steps between agents that live and a trainer that learns."""
