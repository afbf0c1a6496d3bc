"""Programs that run in a framework's own Python. They import the framework and nothing of Stepwell."""
