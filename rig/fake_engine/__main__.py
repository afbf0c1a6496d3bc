"""The fake engine as a process of its own, for load tests: `python -m rig.fake_engine --port P`.

Prints its address, serves until it is ended, and is driven over `PUT /fake/faults` and `GET /fake/state`.
"""

import argparse
import asyncio
import contextlib
import sys

import uvloop

from rig.fake_engine.engine import FakeEngine


async def serve(port: int, max_model_len: int) -> None:
    async with FakeEngine(port=port, max_model_len=max_model_len) as engine:
        sys.stdout.write(f"{engine.url}\n")
        sys.stdout.flush()
        await asyncio.Event().wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, default=0, help="0 takes any free one")
    parser.add_argument("--max-model-len", type=int, default=32_768)
    given = parser.parse_args()
    with contextlib.suppress(KeyboardInterrupt):
        uvloop.run(serve(given.port, given.max_model_len))


if __name__ == "__main__":
    main()
