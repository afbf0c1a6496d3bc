"""One shard of the pool: its transactions, the calls to it, its journal and its archive."""
