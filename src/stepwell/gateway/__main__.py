"""`python -m stepwell.gateway FLAGS` is `stepwell gateway FLAGS`."""

import runpy
import sys

if __name__ == "__main__":
    sys.argv.insert(1, "gateway")
    runpy.run_module("stepwell", run_name="__main__", alter_sys=True)
