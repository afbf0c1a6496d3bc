"""A benchmark with one figure, for what runs benchmarks: `python -m benchmarks.tests.made_up_benchmark 1.5`.

Its target is 2 at most. `crash` ends before the figures, `hang` never ends.
"""

import signal
import sys

from benchmarks.report import report

if __name__ == "__main__":
    (asked,) = sys.argv[1:]
    print("measuring", flush=True)
    if asked == "crash":
        raise SystemExit("nothing was measured")
    if asked == "hang":
        signal.pause()
    report({"figure": float(asked), "other": 3}, at_most={"figure": 2.0})
