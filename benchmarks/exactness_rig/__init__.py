"""Conversations in every dialect through a gateway with the bridge, judged by what the engine was asked and sampled."""
