"""Rollouts of environments that were written for other frameworks: verifiers and Harbor."""
