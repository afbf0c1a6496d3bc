"""The dashboard over a pool on Ray with 100,000 trajectories: how soon it shows them, how fast it filters,
also in a browser, and what it costs the pool.

The pool has one shard and a light load throughout: groups arrive and are trained. The cost of watching is the CPU
time of the shard's process, measured in turns with the dashboard's process stopped and running, while a page polls it
like a browser; so other load on the machine affects both alike.

    python -m benchmarks.dashboard
"""

import os
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

from rig.ray_cluster import start_ray  # isort: skip # sets Ray's environment, so it comes before Ray

import numpy as np
import ray
from playwright.sync_api import Browser, Page, expect

from benchmarks.gateway_rig.processes import Server, cpu_seconds, memory_bytes, serving
from benchmarks.report import parse_no_options, report
from rig.browser import open_browser, open_page
from rig.made_up_rollouts import summary_of
from rig.tiny_model import make_tiny_model
from rig.vocabulary import encode
from rig.waiting import wait_until
from stepwell.dashboard.follower import ConversationTexts, keys_with_text
from stepwell.dashboard.index import Search, TrajectoryIndex
from stepwell.pool.actors import start_pool
from stepwell.pool.api.leasing import BatchRequest
from stepwell.pool.api.plan import Limits, PoolPlan
from stepwell.pool.api.producing import Registration
from stepwell.pool.api.watching import Changes
from stepwell.pool.slices.producing import AddGroups
from stepwell.steps.columns import Columns, pack
from stepwell.steps.step import Exactness, Step, ids_array, logprobs_array

HELD = 100_000
GROUP, A_MESSAGE = 8, 400
LOAD_GROUPS = 20
"""A second: 160 steps."""
ROUNDS, ROUND_SECONDS, CATCH_UP = 4, 10.0, 5.0
ASKED = 9
"""How often each filter is asked; the median counts."""
TEXTS_SECONDS = 45.0
TEXT = 1_500
"""Characters of a conversation, where 100,000 of them are searched."""
NAMESPACE = "benchmark"
PAGE_FILTERS = {"state": "ready", "reward_min": "0.9", "exactness": "submitted", "uid": "4711"}
PAGE_TRIES = 3
"""The fastest counts."""
SHOWN_AFTER = """
([name, value]) => new Promise((done) => {
  const began = performance.now();
  const control = document.querySelector(`.filters [name=${name}]`);
  new PerformanceObserver((list) => {
    const mark = list.getEntries().find((entry) => String(entry.detail?.[name] ?? "") === value);
    if (mark) done((mark.startTime - began) / 1000);
  }).observe({ type: "mark" });
  control.value = value;
  control.dispatchEvent(new Event(control.localName === "select" ? "change" : "input"));
})
"""
"""Seconds from a change of a filter, with the page's wait for more typing, to the frame that shows the rows."""
FILTERS = {
    "none": "",
    "channel": "channel=train",
    "state": "state=ready",
    "reward": "reward_min=0.25&reward_max=0.75",
    "version": "version_min=3&version_max=5",
    "exactness": "exactness=engine",
    "source": "source=sums",
    "uid": "uid=7a",
    "sorted": "sort=-reward",
    "deep": "sort=tokens&offset=90000",
    "all": "channel=train&state=ready&reward_min=0.25&version_min=2&exactness=engine&sort=-tokens",
}

numbers = count()


class Pool:
    """One shard, called as gateways and trainers do."""

    def __init__(self) -> None:
        start_pool(PoolPlan(limits=Limits(max_queue_size=10**6)), NAMESPACE)
        self._shard: Any = ray.get_actor("data_pool", NAMESPACE)
        self._luck = np.random.default_rng(0)
        self.pid = self._pid()

    def submit(self, trajectories: int) -> None:
        steps, registrations = self._groups(trajectories)
        (verdicts,) = ray.get(self._shard.run.remote([AddGroups(steps, registrations)]))
        assert set(verdicts) == {"accepted"}

    def train(self, groups: int) -> None:
        request = BatchRequest(count=groups, channel="train")
        uid = f"batch {next(numbers)}"
        assert ray.get(self._shard.take.remote(request, 60.0, uid)) is not None
        ray.get(self._shard.ack.remote(uid))

    @contextmanager
    def load(self) -> Iterator[None]:
        """As many come in as go, until the block ends."""
        stop = threading.Event()

        def run() -> None:
            while not stop.wait(1.0):
                self.submit(LOAD_GROUPS * GROUP)
                self.train(LOAD_GROUPS)

        thread = threading.Thread(target=run)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()

    def _pid(self) -> int:
        return int(ray.get(self._shard.__ray_call__.remote(lambda _: os.getpid())))

    def _groups(self, trajectories: int) -> tuple[Columns, list[Registration]]:
        names = [next(numbers) for _ in range(trajectories)]
        steps = [self._step(number) for number in names]
        return pack(steps), [
            Registration(step.trajectory_uid, step.prompt_uid, "train", GROUP, source="sums") for step in steps
        ]

    def _step(self, number: int) -> Step:
        a, b = number // GROUP % 997, number // GROUP % 89
        response = encode(f"The sum of {a} and {b} is {a + b}, which I have worked out by adding them.<|im_end|>")
        asked = f"<|im_start|>user\nHow much is {a} plus {b}? Take your time.<|im_end|>\n<|im_start|>assistant\n"
        return Step(
            prompt_ids=ids_array(encode("<|im_start|>system\nYou add numbers.<|im_end|>\n" + asked)),
            response_ids=ids_array(response),
            response_logprobs=logprobs_array(-self._luck.random(len(response))),
            trajectory_uid=f"{number:032x}",
            prompt_uid=f"p-{number // GROUP:08x}",
            step_index=0,
            uid=f"{number:x}",
            policy_version=number // GROUP % 8,
            reward=float(self._luck.random()),
            is_last=True,
            exactness=Exactness.ENGINE if number % 3 else Exactness.SUBMITTED,
        )


def timed(server: Server, query: str) -> tuple[float, Any]:
    """Milliseconds, and the answer."""
    begun = time.perf_counter()
    answer = server.ask(f"/api/trajectories?limit=100&{query}")
    return (time.perf_counter() - begun) * 1e3, answer


def measure_arrival(server: Server) -> dict[str, float]:
    """From the moment at which the process answers at all."""
    begun = time.perf_counter()
    wait_until(lambda: len(timed(server, "")[1]["rows"]) == 100, "the first page")
    first = time.perf_counter() - begun
    wait_until(lambda: timed(server, "")[1]["total"] >= HELD, "all trajectories", 120)
    return {"first_page_s": round(first, 2), "all_known_s": round(time.perf_counter() - begun, 2)}


def measure_filters(server: Server, filters: dict[str, str]) -> dict[str, float]:
    figures = {}
    for name, query in filters.items():
        took = [timed(server, query) for _ in range(ASKED)]
        figures[f"filter_{name}_ms"] = round(statistics.median(milliseconds for milliseconds, _ in took), 1)
        print(f"{name:>14} {figures[f'filter_{name}_ms']:>8,.1f} ms  {took[0][1]['matched']:>8,} matched", flush=True)
    return figures


@contextmanager
def polling(server: Server) -> Iterator[None]:
    """As an open page does: the overview every two seconds, the list every five."""
    stop = threading.Event()

    def run() -> None:
        for tick in count():
            if stop.wait(1.0):
                return
            for path, every in (("status", 2), ("series?seconds=900", 2), ("trajectories", 5)):
                if tick % every == 0:
                    server.ask(f"/api/{path}")

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def measure_watching(pool: Pool, server: Server) -> dict[str, float]:
    """The share of a second that the shard works more because it is watched, and while texts are read."""
    extra, alone = [], []
    for number in range(ROUNDS):
        os.kill(server.pid, signal.SIGSTOP)
        without = shard_share(pool)
        os.kill(server.pid, signal.SIGCONT)
        with polling(server):
            time.sleep(CATCH_UP)
            watched = shard_share(pool)
        alone.append(without)
        extra.append(watched - without)
        print(f"watching {number + 1}/{ROUNDS}: alone {without:.4f}, watched {watched:.4f}", flush=True)
    return {"pool_share": round(statistics.median(extra), 4), "pool_share_alone": round(statistics.median(alone), 4)}


def shard_share(pool: Pool) -> float:
    begun, before = time.perf_counter(), cpu_seconds(pool.pid)
    time.sleep(ROUND_SECONDS)
    return (cpu_seconds(pool.pid) - before) / (time.perf_counter() - begun)


def measure_indexing(server: Server) -> dict[str, float]:
    """How fast conversations are read, without load: the newest come first, so a load would take its part."""
    begun, before = time.perf_counter(), server.ask("/api/status")["index"]["texts"]
    time.sleep(TEXTS_SECONDS)
    added = server.ask("/api/status")["index"]["texts"] - before
    return {"texts_a_second": round(added / (time.perf_counter() - begun))}


def measure_text_search() -> dict[str, float]:
    """All texts known, in this process: what the search itself takes, for words that hardly any of them has."""
    index, texts = TrajectoryIndex(), ConversationTexts()
    words = ["reasoning", "therefore", "number", "tool", "answer", "please", "equals", "carry"]
    for start in range(0, HELD, A_MESSAGE):
        rows = [summary_of(number) for number in range(start, start + A_MESSAGE)]
        index.apply(Changes(snapshots=rows, cursors={}))
        for number, row in enumerate(rows, start):
            said = " ".join(words[(number * 7 + place) % 8] for place in range(TEXT // 7))
            texts.put(row, f"{said} {number}")
    took = []
    for _ in range(ASKED):
        begun = time.perf_counter()
        found = index.find(Search(), keys_with_text(texts.copy(), "number 99"))
        took.append((time.perf_counter() - begun) * 1e3)
    print(f"{len(texts):,} texts searched, {found.matched:,} matched", flush=True)
    return {"texts_searched": len(texts), "filter_100k_texts_ms": round(statistics.median(took), 1)}


def measure_page(url: str) -> dict[str, float]:
    """In the browser: seconds to the first rows, and the slowest filter's seconds to its rows."""
    with open_browser() as browser:
        paints = [first_paint(browser, url) for _ in range(PAGE_TRIES)]
        with open_page(browser, url) as (page, _):
            page.goto(f"{url}/#/trajectories")
            expect(page.locator("table.rows tbody tr")).to_have_count(100, timeout=30_000)
            slowest = max(page_filter(page, name, value) for name, value in PAGE_FILTERS.items())
    return {"page_first_paint_s": round(min(paints), 2), "page_slowest_filter_s": round(slowest, 2)}


def first_paint(browser: Browser, url: str) -> float:
    """Seconds from the start of the navigation, with an empty cache, to the frame that shows rows."""
    with open_page(browser, url) as (page, _):
        page.goto(f"{url}/#/trajectories")
        expect(page.locator("table.rows tbody tr")).to_have_count(100, timeout=30_000)
        return float(page.evaluate("performance.getEntriesByName('rows-shown')[0].startTime")) / 1000


def page_filter(page: Page, name: str, value: str) -> float:
    took = []
    for _ in range(PAGE_TRIES):
        took.append(float(page.evaluate(SHOWN_AFTER, [name, value])))
        page.evaluate(SHOWN_AFTER, [name, ""])
    return min(took)


def main() -> None:
    parse_no_options(__doc__)
    figures = measure_text_search()
    with tempfile.TemporaryDirectory() as folder, start_ray(object_store_memory=2**30) as cluster:
        model, pool = make_tiny_model(Path(folder, "model")), Pool()
        for _ in range(HELD // A_MESSAGE):
            pool.submit(A_MESSAGE)
        command = ["-m", "stepwell", "dashboard", "--port", "{port}", "--ray-address", cluster.address]
        command += ["--ray-namespace", NAMESPACE, "--tokenizer-path", str(model)]
        with serving([sys.executable, *command], Path(folder, "log")) as server:
            with pool.load():
                figures |= measure_arrival(server) | measure_filters(server, FILTERS)
                figures |= measure_watching(pool, server)
            figures |= measure_page(server.url)
            figures |= measure_indexing(server) | measure_filters(server, {"text": "text=The+sum+of+77"})
            figures["dashboard_mb"] = round(memory_bytes(server.pid) / 1e6)
    for name, value in figures.items():
        print(f"{name:>24} {value:>12,}")
    slowest = max(value for name, value in figures.items() if name.startswith("filter_"))
    report(
        figures | {"slowest_filter_ms": slowest},
        at_most={
            "first_page_s": 2.0,
            "slowest_filter_ms": 1_000.0,
            "page_first_paint_s": 2.0,
            "page_slowest_filter_s": 1.0,
            "pool_share": 0.02,
        },
        at_least={"texts_searched": 0.9 * HELD},
    )


if __name__ == "__main__":
    main()
