"""How an environment runs: a pure pace and thin shells."""
