"""The guard on the way of new weights to all sessions: validation, a sequential test on some of them, rollback."""
