"""Groups that environments send: from a request's body to the pool's verdict.

Invariants:
- A group is taken completely or not at all, and once, even if it is sent several times, to several servers.
- A sender is answered after the pool has the group.
- Only an Idempotency-Key says that two groups are one, and the pool recognises them, so a server need not remember it.
  Equal content says nothing: where answers are short, most groups of a prompt are equal, and to drop them would change
  the distribution that is trained.
"""

import asyncio
import contextlib
import hashlib
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Literal, NamedTuple
from uuid import uuid4

import numpy as np
import orjson

from stepwell.atropos.http import IN_THREAD, AtroposRequest
from stepwell.atropos.registry import AtroposMetrics, Registry
from stepwell.common.async_calls import BatchSender
from stepwell.errors import BadRequest, PoolFull, TooLarge
from stepwell.pool.api.producing import TRAIN, Registration, SubmitVerdict
from stepwell.pool.client import PoolClient
from stepwell.steps.trainable import LeftOutLog
from stepwell.wire.scored_groups import ScoredGroup, groups_from_json
from stepwell.wire.scored_groups_arrow import MEDIA_TYPE, groups_from_arrow, groups_of_streams
from stepwell.wire.scored_groups_steps import columns_from_groups, with_temperature

log = logging.getLogger("stepwell.atropos")

REPEATED = {SubmitVerdict.DUPLICATE, SubmitVerdict.LATE}
"""The pool has the step, or had it."""
READING_TIMEOUT = 0.01
"""Seconds that a message waits for groups that are being read."""
PAUSE = 0.004
"""Seconds between two messages. Environments that were just answered come back in this time with their next groups."""
MAX_MESSAGE_TOKENS = 2**25
SEQUENCE_WEIGHT = 2**13
"""The tokens that cost the pool as much as a sequence by itself. Meanwhile a shard serves nobody else."""
PIECE = 1024
"""Sequences of one request that are packed and sent at a time, unless a single group has more."""
MAX_SEQUENCES = 2**14
"""The most sequences in one request: some seconds of work."""
DIGEST_DIGITS = 32


class OpenReads:
    """How many requests are being read."""

    def __init__(self) -> None:
        self._count = 0
        self._none = asyncio.Event()
        self._none.set()

    @contextlib.contextmanager
    def one(self) -> Iterator[None]:
        self._count += 1
        self._none.clear()
        try:
            yield
        finally:
            self._count -= 1
            if not self._count:
                self._none.set()

    async def wait(self) -> None:
        """Waits until there are no open reads, or for READING_TIMEOUT."""
        if self._none.is_set():
            return
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._none.wait(), READING_TIMEOUT)


class GroupReader:
    """Reads requests. Small Arrow bodies that arrive at the same time are read in one pass."""

    def __init__(self) -> None:
        self._arriving = OpenReads()
        self._together = BatchSender[bytes, list[ScoredGroup]](self._read, before_send=self._arriving.wait)

    async def read(self, request: AtroposRequest, kind: Literal["group", "list"]) -> list[ScoredGroup]:
        if request.headers.get("content-type", "").startswith(MEDIA_TYPE):
            groups = _with_scores(await self._read_arrow(request), request.query_params.get("env_id"))
        else:
            body = await request.body()
            read = partial(groups_from_json, kind=kind)
            groups = await asyncio.to_thread(read, body) if len(body) > IN_THREAD else read(body)
        if kind == "group" and not groups:
            raise BadRequest("the body has no group")
        return groups

    async def _read_arrow(self, request: AtroposRequest) -> list[ScoredGroup]:
        with self._arriving.one():
            body = await request.body()
        if len(body) > IN_THREAD:
            return await asyncio.to_thread(groups_from_arrow, body)
        return await self._together.submit(body)

    async def _read(self, bodies: Sequence[bytes]) -> list[list[ScoredGroup] | Exception]:
        return groups_of_streams(bodies)


def _with_scores(groups: Sequence[ScoredGroup], env_id: str | None) -> list[ScoredGroup]:
    """BadRequest if a score is missing, which Arrow allows."""
    groups = [_with_env_id(group, env_id) for group in groups]
    if any(np.isnan(group.scores_N).any() for group in groups):
        raise BadRequest("score: a row has none")
    return groups


def _with_env_id(group: ScoredGroup, env_id: str | None) -> ScoredGroup:
    """The group with the env_id of the URL, unless it names one itself."""
    if env_id is None or group.env_id is not None:
        return group
    if not env_id.isdecimal():
        raise BadRequest(f"env_id: {env_id!r} is not an integer")
    return replace(group, env_id=int(env_id))


def name_by_key(channel: str, key: str, place: int) -> str:
    """The prompt_uid of the group at this place in the request with this key. The same group sent again has the same
    one, so it comes to the same shard."""
    named = orjson.dumps([channel, key, place])
    return f"scored-{hashlib.sha256(named, usedforsecurity=False).hexdigest()[:DIGEST_DIGITS]}"


def new_name() -> str:
    """The prompt_uid of a group without a key."""
    return f"scored-{uuid4().hex}"


class NamedGroup(NamedTuple):
    """A group as it goes to the pool."""

    group: ScoredGroup
    prompt_uid: str
    channel: str
    source: str

    @property
    def weight(self) -> int:
        return len(self.group.tokens) + SEQUENCE_WEIGHT * len(self.group)

    def registrations(self) -> Iterator[Registration]:
        size = len(self.group)
        for place in range(size):
            yield Registration(f"{self.prompt_uid}-{place}", self.prompt_uid, self.channel, size, source=self.source)


class GroupIntake:
    def __init__(self, pool: PoolClient, metrics: AtroposMetrics, wall_clock: Callable[[], float] = time.time) -> None:
        self.latest: dict[str, ScoredGroup] = {}
        """The newest group of each channel."""
        self._metrics = metrics
        self._sender = GroupSender(pool, wall_clock)
        self.reading = self._sender.reading

    async def submit(
        self, channel: str, registry: Registry, groups: Sequence[ScoredGroup], key: str | None, now: float
    ) -> list[bool]:
        """Sends the groups, and tells for each one whether the pool had it already. PoolFull if there is no room for
        one of them."""
        _check_sizes(groups, registry)
        repeated: list[bool] = []
        for piece in _pieces(groups):
            names = [
                new_name() if key is None else name_by_key(channel, key, place)
                for place in range(len(repeated), len(repeated) + len(piece))
            ]
            found = await self._submit_piece(channel, registry, piece, names, now)
            if SubmitVerdict.FULL in set().union(*found):
                for _ in groups[len(repeated) + len(piece) :]:
                    self._metrics.count_group("refused")
                raise PoolFull(f"channel {channel!r} is full; there will be room once the trainer has taken some")
            self.latest[channel] = piece[-1]
            repeated += [verdicts <= REPEATED for verdicts in found]
        return repeated

    async def _submit_piece(
        self, channel: str, registry: Registry, groups: Sequence[ScoredGroup], names: Sequence[str], now: float
    ) -> list[set[SubmitVerdict]]:
        """The verdicts on each group."""
        named = []
        for group, name in zip(groups, names, strict=True):
            sender = registry.heard_from(group.env_id, now)
            source = "" if sender is None else sender.name
            temperature = None if sender is None else sender.wanted.temperature
            named.append(NamedGroup(with_temperature(group, temperature), name, channel, source))
        verdicts = iter(await self._sender.submit(named))
        verdicts_of_groups = [{next(verdicts) for _ in range(len(group))} for group in groups]
        for found in verdicts_of_groups:
            result = "refused" if SubmitVerdict.FULL in found else "duplicate" if found <= REPEATED else "received"
            self._metrics.count_group(result)
        return verdicts_of_groups

    def drop(self, channel: str) -> None:
        self.latest.pop(channel, None)


def _check_sizes(groups: Sequence[ScoredGroup], registry: Registry) -> None:
    total = sum(map(len, groups))
    if total > MAX_SEQUENCES:
        raise TooLarge(
            f"{total} sequences are more than the {MAX_SEQUENCES} that one request may have; send several requests"
        )
    most = max(map(len, groups), default=0)
    largest = None if registry.trainer is None else registry.trainer.batch_size
    if largest is not None and most > largest:
        raise BadRequest(
            f"a group of {most} sequences never fits a batch of {largest}, which the trainer has registered; "
            "send smaller groups"
        )


def _pieces(groups: Sequence[ScoredGroup]) -> Iterator[Sequence[ScoredGroup]]:
    """Whole groups, of PIECE sequences together at most, if a single one has no more."""
    begin = size = 0
    for place, group in enumerate(groups):
        size += len(group)
        if size > PIECE and place > begin:
            yield groups[begin:place]
            begin, size = place, len(group)
    if begin < len(groups):
        yield groups[begin:]


class GroupSender:
    """Sends groups of several requests to the pool in one message.

    A message waits a moment for groups that are being read. Where many groups come, it also waits for environments that
    were just answered; a single environment waits for no one.
    """

    def __init__(self, pool: PoolClient, wall_clock: Callable[[], float] = time.time) -> None:
        self._pool = pool
        self._wall_clock = wall_clock
        self._left_out = LeftOutLog(log)
        reads = OpenReads()
        self.reading = reads.one
        """Around the reading of a request's groups: the next message waits for them."""
        self._sender = BatchSender[Sequence[NamedGroup], list[SubmitVerdict]](
            self._send,
            before_send=reads.wait,
            pause=PAUSE,
            weigh=lambda groups: sum(group.weight for group in groups),
            max_weight=MAX_MESSAGE_TOKENS,
            sends_cancelled=True,
        )

    async def submit(self, groups: Sequence[NamedGroup]) -> list[SubmitVerdict]:
        """One verdict a sequence. The groups are sent even if the caller is cancelled."""
        return await self._sender.submit(groups)

    async def _send(self, message: Sequence[Sequence[NamedGroup]]) -> list[list[SubmitVerdict]]:
        groups = list(chain.from_iterable(message))
        registrations = [registration for group in groups for registration in group.registrations()]
        columns = columns_from_groups(
            [named.group for named in groups],
            [named.prompt_uid for named in groups],
            [registration.trajectory_uid for registration in registrations],
            sources=[named.source for named in groups],
            policy_version=self._pool.policy_version,
            arrived_at=self._wall_clock(),
        )
        for registration, reason in zip(registrations, columns.untrainable, strict=True):
            self._left_out.note(registration.channel or TRAIN, [reason])
        verdicts = iter(await self._pool.submit_columns(columns, registrations))
        return [[next(verdicts) for named in part for _ in range(len(named.group))] for part in message]
