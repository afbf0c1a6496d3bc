"""The guard on the way of new weights to all sessions: validation, a canary with a sequential test, rollback."""
