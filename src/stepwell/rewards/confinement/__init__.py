"""Where generated code runs: levels of isolation, and the processes in them."""
