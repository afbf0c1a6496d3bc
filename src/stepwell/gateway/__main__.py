"""`python -m stepwell.gateway`: the same as `stepwell gateway`."""

import sys

from stepwell.cli import run

if __name__ == "__main__":
    run("gateway", sys.argv[1:], "python -m stepwell.gateway")
