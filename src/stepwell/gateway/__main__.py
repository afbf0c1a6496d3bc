"""`python -m stepwell.gateway`: the same as `stepwell gateway`."""

import sys
from importlib import import_module

if __name__ == "__main__":
    cli = import_module("stepwell.cli")  # by name: the command line is above this package
    cli.run("gateway", sys.argv[1:], "python -m stepwell.gateway")
