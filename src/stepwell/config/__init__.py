"""The settings, a module for each subject."""
