"""Public chat templates, tokenizers for them, and conversations that try the bridge with each."""
