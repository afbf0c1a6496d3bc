"""A Ray node that a process of its own starts, and starts again whenever it ends, as a supervisor does.

The process may run in a network namespace, and its node does then too. It reads Ray's settings and the parameters of
the node from its standard input, and ends with it.
"""

import json
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rig.ray_nodes import kill_node_processes, start_node
from rig.waiting import wait_until

logger = logging.getLogger("ray_node_process")

STARTED = "the node has started"
START_TIMEOUT = 120.0

LOOK_INTERVAL = 0.5
"""Seconds."""
END_TIMEOUT = 60.0


@contextmanager
def ray_node_process(
    prefix: Sequence[str], settings: Mapping[str, str], params: Mapping[str, Any], log: Path
) -> Iterator[None]:
    """`prefix` is put before the command, for example to enter a namespace."""
    line = [*prefix, sys.executable, "-m", "rig.ray_node_process"]
    with log.open("ab") as output:
        process = subprocess.Popen(line, stdin=subprocess.PIPE, stdout=output, stderr=output)
    assert process.stdin is not None
    try:
        process.stdin.write(json.dumps([dict(settings), dict(params)]).encode() + b"\n")
        process.stdin.flush()
        wait_until(lambda: STARTED in log.read_text(), "the node to start", START_TIMEOUT)
        yield
    finally:
        process.stdin.close()
        try:
            process.wait(END_TIMEOUT)
        finally:
            process.kill()


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    settings, params = json.loads(sys.stdin.readline())
    os.environ.update(settings)  # before Ray is imported
    ended = threading.Event()

    def wait_for_end() -> None:
        sys.stdin.read()
        ended.set()

    threading.Thread(target=wait_for_end, daemon=True).start()
    while not ended.is_set():
        try:
            node = start_node(params, is_head=False)
        except Exception as failure:  # noqa: BLE001 - the cluster may not be reachable now
            logger.warning("the node did not start: %r", failure)
            time.sleep(LOOK_INTERVAL)
            continue
        logger.info(STARTED)
        while node.remaining_processes_alive() and not ended.wait(LOOK_INTERVAL):
            pass
        kill_node_processes(node)
        logger.info("the node has ended")


if __name__ == "__main__":
    main()
