"""How an environment runs: pure decisions in `pace`, thin shells around them."""
