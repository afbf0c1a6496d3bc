"""The program that runs a candidate's code with one test: a job as JSON on stdin, the verdict on stdout.

It is started as a file in isolated mode, so it imports nothing of Stepwell. It writes READY after its limits are set
and before any code of the candidate runs; without READY, the failure is not the candidate's. What the candidate prints
is discarded.
"""

import json
import os
import resource
import sys

READY = b"ready\n"
FAILED = b"failed: "
LONGEST_TEXT = 300


def main() -> None:
    job = json.load(sys.stdin)
    verdict = _discard_output()
    for name, limit in job["limits"].items():
        _limit(getattr(resource, name), limit)
    os.write(verdict, READY)
    namespace = {"__name__": "candidate"}
    try:
        exec(compile(job["code"], "candidate", "exec"), namespace)
        exec(compile(job["test"], "test", "exec"), namespace)
    except BaseException as failure:  # noqa: BLE001 - any exception is a failure
        os.write(verdict, FAILED + _failure_text(failure))
        os._exit(1)
    os.write(verdict, job["passed"].encode())
    os._exit(0)


def _discard_output() -> int:
    """Redirects the three standard streams to /dev/null; returns the old stdout."""
    verdict, nothing = os.dup(1), os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(nothing, stream)
    return verdict


def _limit(kind: int, limit: int) -> None:
    _, hard = resource.getrlimit(kind)
    lower = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
    resource.setrlimit(kind, (lower, lower))


def _failure_text(failure: BaseException) -> bytes:
    return f"{type(failure).__name__}: {failure}".removesuffix(": ")[:LONGEST_TEXT].encode(errors="replace")


if __name__ == "__main__":
    main()
