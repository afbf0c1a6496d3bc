"""The bridge: a call that continues a recorded conversation is sent to the engine as exact token ids."""
