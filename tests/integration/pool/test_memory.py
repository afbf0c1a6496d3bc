"""What a pool takes of the machine's memory: what it holds and little more, however much has gone through it."""

import os
from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import ray
from stepwell.pool.slices.producing import AddSteps

from rig.actors import actor, pid_of
from stepwell.pool.api.leasing import BatchRequest
from stepwell.pool.api.plan import Limits, PoolPlan
from stepwell.steps.columns import Columns, pack, unpack
from stepwell.steps.step import IntArray, Step, logprobs_array
from tests.integration.pool.conftest import started

GROUPS, GROUP = 1_000, 16
"""What the pool is bounded to, and single-step trajectories in a group: 164 MB."""
PROMPT, RESPONSE = 2_048, 256
RAW_BYTES = 4 * (PROMPT + RESPONSE) + 4 * RESPONSE
PASSING = 60_000
A_MESSAGE = 20 * GROUP
IN_FLIGHT = 4
TURNS, FINAL_LENGTH = 200, 100_000

luck = np.random.default_rng(0)


def test_a_full_pool_takes_little_more_than_it_holds_however_much_went_through_it(namespace: str) -> None:
    started(PoolPlan(limits=Limits(max_queue_size=GROUPS)), namespace)
    pool, pid = actor("data_pool", namespace), pid_of("data_pool", namespace)
    messages = endless_messages()
    ray.get(pool.run.remote([AddSteps(next(messages), "train", GROUP)]))
    ray.get(pool.take.remote(BatchRequest(count=A_MESSAGE // GROUP, channel="train"), 60.0, "lease"))
    ray.get(pool.ack.remote("lease"))
    before = own_memory(pid)

    send(pool, islice(messages, GROUPS * GROUP // A_MESSAGE))
    raw = GROUPS * GROUP * RAW_BYTES
    assert ray.get(pool.stats.remote()).channels["train"].groups == GROUPS
    assert own_memory(pid) - before <= 1.3 * raw

    send(pool, islice(messages, PASSING // A_MESSAGE))
    stats = ray.get(pool.stats.remote())
    assert stats.submitted > PASSING
    held = stats.channels["train"].nbytes
    assert held >= 100e6
    assert own_memory(pid) - before <= 1.5 * held


def test_a_long_session_is_stored_once_and_comes_out_bit_for_bit(namespace: str) -> None:
    started(PoolPlan(), namespace)
    pool = actor("data_pool", namespace)
    session = list(turns(TURNS, FINAL_LENGTH))
    assert session[-1].tokens == FINAL_LENGTH
    for step in session:
        assert ray.get(pool.run.remote([AddSteps(pack([step]), "train")])) == [["accepted"]]
    assert ray.get(pool.stats.remote()).channels["train"].nbytes <= 3 * 4 * FINAL_LENGTH

    leased = ray.get(pool.take.remote(BatchRequest(count=1, channel="train"), 60.0, "lease"))
    shipped = unpack(leased.columns, copy=False)
    assert [step.uid for step in shipped] == [step.uid for step in session]
    for ours, theirs in zip(session, shipped, strict=True):
        assert ours.prompt_ids.tobytes() == theirs.prompt_ids.tobytes()
        assert ours.response_ids.tobytes() == theirs.response_ids.tobytes()
        assert ours.response_logprobs is not None
        assert theirs.response_logprobs is not None
        assert ours.response_logprobs.tobytes() == theirs.response_logprobs.tobytes()


def endless_messages() -> Iterator[Columns]:
    """The same tokens over and over (the pool copies them each time), under new names."""
    steps = [make_turn("", ids(PROMPT), RESPONSE, is_last=True) for _ in range(A_MESSAGE)]
    columns, number = pack(steps), 0
    while True:
        numbers = range(number, number + A_MESSAGE)
        number += A_MESSAGE
        yield replace(
            columns,
            uids=[f"step-{n}" for n in numbers],
            trajectory_uids=[f"trajectory-{n}" for n in numbers],
            prompt_uids=[f"prompt-{n // GROUP}" for n in numbers],
        )


def turns(count: int, final_length: int) -> Iterator[Step]:
    """Each turn's prompt is all that was said before, and what the world answered."""
    a_turn, said = final_length // count, ids(0)
    for n in range(count):
        prompt = np.concatenate([said, ids(a_turn * 4 // 5)])
        step = make_turn(f"turn-{n}", prompt, a_turn // 5, started_at=float(n), is_last=n == count - 1)
        said = np.concatenate([prompt, step.response_ids])
        yield step


def make_turn(uid: str, prompt: IntArray, response: int, **fields: Any) -> Step:
    return Step(
        uid=uid,
        prompt_ids=prompt,
        response_ids=ids(response),
        response_logprobs=logprobs_array(-luck.random(response)),
        trajectory_uid="t",
        prompt_uid="p",
        **fields,
    )


def ids(count: int) -> IntArray:
    return luck.integers(0, 150_000, count, dtype=np.int32)


def send(pool: Any, messages: Iterator[Columns]) -> None:
    answers: deque[Any] = deque()
    for message in messages:
        answers.append(pool.run.remote([AddSteps(message, "train", GROUP)]))
        if len(answers) > IN_FLIGHT:
            ray.get(answers.popleft())
    ray.get(list(answers))


def own_memory(pid: int) -> int:
    """Bytes resident and not shared: Ray's object store, through which messages come, is mapped by every process."""
    _, resident, shared, *_ = Path(f"/proc/{pid}/statm").read_text().split()
    return (int(resident) - int(shared)) * os.sysconf("SC_PAGE_SIZE")
