"""`stepwell gateway --workers`: several processes serve one port through one link to Ray, and any of them may die."""

import os
import re
import signal
import socket
import subprocess
import sys
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import httpx

from rig.gateways import free_port
from rig.waiting import answers, wait_until
from stepwell.pool.client import DataPool
from tests.integration.gateway.conftest import StartGateway

CALLS = 12
WORKERS = 2
MOST_WORKER_MB, MOST_KEEPER_MB = 120, 75
"""Resident, of a worker that has not decoded or encoded a text, and of the process that keeps the workers running."""
post = partial(httpx.post, timeout=120.0)


def free_ports(count: int) -> int:
    """The first of so many free ports in a row."""
    while True:
        port = free_port()
        try:
            with ExitStack() as stack:
                for n in range(count):
                    stack.enter_context(socket.create_server(("127.0.0.1", port + n)))
        except (OSError, OverflowError):
            continue
        return port


def children(pid: int, words: str) -> list[int]:
    """The children of a process whose command line has these words."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if f"PPid:\t{pid}\n" in (process / "status").read_text() and words in (process / "cmdline").read_text():
                found.append(int(process.name))
        except OSError:
            continue
    return sorted(found)


def resident_mb(pid: int) -> float:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


def say(base_url: str) -> None:
    """Over a connection of its own, which any worker may accept."""
    body = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}
    assert post(f"{base_url}/v1/chat/completions", json=body).status_code == httpx.codes.OK


def recorded(url: str) -> float:
    text = httpx.get(f"{url}/metrics", timeout=120.0).text
    return sum(map(float, re.findall(r"^stepwell_delivered_steps_total{.*} (\S+)$", text, re.M)))


def test_workers_share_a_port_and_a_link_and_die_without_a_loss(
    start_gateway: StartGateway, data_pool: DataPool, tmp_path: Path
) -> None:
    port = free_ports(1 + WORKERS)
    owns = [f"http://127.0.0.1:{port + 1 + n}" for n in range(WORKERS)]
    with start_gateway(port=port, workers=WORKERS, spool=tmp_path / "spool") as gateway:
        for own in owns:
            wait_until(partial(answers, f"{own}/ready"), f"{own} to be ready")
        (link,) = children(gateway.process.pid, "link_process")
        opened = post(f"{gateway.url}/init_trajectory", json={}).json()
        base = f"{gateway.url}/{opened['trajectory_uid']}/{opened['prompt_uid']}"
        for own in owns:
            say(base.replace(gateway.url, own))
        workers = children(gateway.process.pid, "spawn_main")
        assert len(workers) == WORKERS
        wait_until(lambda: sum(map(recorded, owns)) == WORKERS, "the steps to be delivered")
        assert max(map(resident_mb, workers)) <= MOST_WORKER_MB
        assert resident_mb(gateway.process.pid) <= MOST_KEEPER_MB

        os.kill(workers[0], signal.SIGKILL)
        for _ in range(CALLS):
            say(base)
        wait_until(lambda: all(answers(f"{own}/ready") for own in owns), "the worker to be back")
        os.kill(link, signal.SIGKILL)
        for _ in range(CALLS):
            say(base)
        wait_until(lambda: children(gateway.process.pid, "link_process") not in ([], [link]), "another link")
        assert post(f"{base}/complete_trajectory", json={"reward": 1.0}).status_code == httpx.codes.OK
    assert not children(gateway.process.pid, "")
    batch = data_pool.fetch_batch(1, timeout=60)
    assert len(list(batch.steps())) == WORKERS + 2 * CALLS
    assert {file.name for file in tmp_path.glob("spool*") if "-wal" not in file.name} >= {"spool", "spool-1"}


def test_a_worker_that_cannot_start_ends_all_with_its_reason() -> None:
    flags = {"--data-pool-name": "x", "--vllm-addresses": "http://127.0.0.1:9", "--tokenizer-path": "no/such/folder"}
    flags |= {"--prompt-length": "9", "--response-length": "9", "--ray-address": f"127.0.0.1:{free_port()}"}
    port = free_ports(3)
    line = [sys.executable, "-m", "stepwell", "gateway", "--workers", "2", "--host", "127.0.0.1"]
    line += ["--port", str(port), *(word for flag in flags.items() for word in flag)]
    with socket.create_server(("127.0.0.1", port + 2)):
        ended = subprocess.run(line, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 1, ended.stderr
    assert f"worker 1: cannot listen on 127.0.0.1:{port + 2}: Address already in use" in ended.stderr
    assert "stepwell gateway: worker 1 cannot start" in ended.stderr
