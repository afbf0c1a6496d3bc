"""What an environment writes: files, pages, wandb."""
