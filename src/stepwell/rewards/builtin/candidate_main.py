"""The program in which a candidate's code meets one test: a job as JSON on stdin, the verdict on stdout.

It is started as a file of its own, in isolated mode, and so imports nothing of Stepwell. It says READY once its limits
hold and before any of the candidate's code runs; without that word, it is not the candidate that failed. What the
candidate prints goes nowhere.
"""

import json
import os
import resource
import sys

READY = b"ready\n"
FAILED = b"failed: "
TEXT_KEPT = 300


def main() -> None:
    job = json.load(sys.stdin)
    verdict = _silence()
    for name, limit in job["limits"].items():
        _limit(getattr(resource, name), limit)
    os.write(verdict, READY)
    namespace = {"__name__": "candidate"}
    try:
        exec(compile(job["code"], "candidate", "exec"), namespace)
        exec(compile(job["test"], "test", "exec"), namespace)
    except BaseException as failure:  # noqa: BLE001 - whatever the code raises, it failed
        os.write(verdict, FAILED + _described(failure))
        os._exit(1)
    os.write(verdict, job["passed"].encode())
    os._exit(0)


def _silence() -> int:
    """Point the three standard streams at nothing; gives what was stdout."""
    verdict, nothing = os.dup(1), os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(nothing, stream)
    return verdict


def _limit(kind: int, limit: int) -> None:
    _, most = resource.getrlimit(kind)
    lower = limit if most == resource.RLIM_INFINITY else min(limit, most)
    resource.setrlimit(kind, (lower, lower))


def _described(failure: BaseException) -> bytes:
    return f"{type(failure).__name__}: {failure}".removesuffix(": ")[:TEXT_KEPT].encode(errors="replace")


if __name__ == "__main__":
    main()
