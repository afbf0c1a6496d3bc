"""What can be asked of a pool: operations, a module for each subject."""
