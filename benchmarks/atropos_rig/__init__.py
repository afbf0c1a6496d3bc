"""The rig of `python -m benchmarks.atropos`: the groups that are sent, the two servers, the clients."""
