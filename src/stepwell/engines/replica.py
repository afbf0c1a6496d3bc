"""One engine as the gateway knows it: its kind, its facts, its state and the version of its weights.

- An engine that is not probed is down; an engine that was down is probed again before it gets a call.
- An engine whose kind tells versions, and that tells no number, serves only the weights that it was started with: once
  the pool's policy version is above 0, it gets no calls until a weight sync.
- So does an engine whose version was refused or rolled back.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Self

from yarl import URL

from stepwell.common.async_calls import Coalescer
from stepwell.engines.capabilities import missing_capabilities
from stepwell.engines.engine import CHANGING, EngineFacts, EngineHttp, EngineKind, probe_engine, sampled_by
from stepwell.errors import EngineUnavailable

log = logging.getLogger("stepwell.gateway")

WATCH_INTERVAL = 0.5
"""Seconds between two checks of an engine."""
PAUSED_WATCH_INTERVAL = 0.1
"""The same for a paused or unsynced engine: calls wait for it."""
SAMPLING_INTERVAL = 10.0
"""Seconds until an engine that gave no token to a probe is asked again."""
VERSION_INTERVAL = 0.02
"""Seconds between two questions for the version of the weights, however many calls need it."""


class EngineState(StrEnum):
    HEALTHY = "healthy"
    PAUSED = "paused"
    """The engine is paused for a weight update: it gets no new calls."""
    UNSYNCED = "unsynced"
    """Nobody knows which weights it has: it gets no new calls until a weight sync."""
    DOWN = "down"


@dataclass(frozen=True, slots=True)
class EngineReport:
    """The observations of a check of an engine, for other processes of the same machine. Times are monotonic."""

    address: str
    facts: EngineFacts
    probed: bool
    state: EngineState
    why: str
    weight_version: str | None
    version_checked_at: float
    checked_at: float
    """When the check began."""

    @classmethod
    def read(cls, fields: dict[str, Any]) -> Self:
        """Reads a report from JSON."""
        facts = fields["facts"] | {"extra_sampling": frozenset(fields["facts"]["extra_sampling"])}
        return cls(**fields | {"facts": EngineFacts(**facts), "state": EngineState(fields["state"])})


class EngineReplica:
    """Compared by identity: an address that was removed and added again is another replica."""

    def __init__(
        self,
        http: EngineHttp,
        kinds: Sequence[EngineKind],
        on_change: Callable[[], None],
        policy_version: Callable[[], int | None] = lambda: 0,
        withdrawn: Callable[[], Collection[int]] = tuple,
    ) -> None:
        """`policy_version` is the pool's; None if the pool has not told it yet. `withdrawn`: versions that were refused
        or rolled back."""
        self.address = http.address
        self.kind = kinds[-1]
        """Known once it is probed."""
        self.facts = EngineFacts()
        self.probed = False
        self.state = EngineState.DOWN
        self.why = "not probed yet"
        """The reason why the engine is down or unsynced; else empty."""
        self.state_since = time.monotonic()
        self.in_flight = 0
        """Calls whose replies are not yet read to the end, including those that wait for a connection."""
        self.weight_version: str | None = None
        """The version as the engine writes it."""
        self.version: int | None = None
        """The policy version, if the engine's version is a number."""
        self.version_checked_at = 0.0
        """Monotonic time at which the last answered question for the version began."""
        self._http = http
        self._kinds = kinds
        self._on_change = on_change
        self._policy_version = policy_version
        self._withdrawn = withdrawn
        self._checking = Coalescer(self._check)
        self._asking_version = Coalescer(self._ask_version, every=VERSION_INTERVAL)
        self._sampling_known = False
        """The engine has answered the probe of its sampling since it was probed."""
        self._probe_sampling_at = 0.0
        """Monotonic time from which it may be asked."""
        self._checked_at = 0.0
        """Monotonic time at which the last check began, or at which a call found it down."""
        self._urls: dict[str, URL] = {}

    def url(self, path: str) -> URL:
        """Parsed once per path."""
        url = self._urls.get(path)
        if url is None:
            url = self._urls[path] = URL(self.address + path)
        return url

    def set_down(self, why: str) -> None:
        self._checked_at = time.monotonic()
        self._lose(why)

    def _lose(self, why: str) -> None:
        self.probed = False
        self.weight_version = self.version = None
        self._set_state(EngineState.DOWN, why)

    async def check(self) -> None:
        """Updates the state, and probes the engine if needed. Afterwards it is probed, or down."""
        await self._checking.fresh()

    def report(self) -> EngineReport:
        return EngineReport(
            address=self.address,
            facts=self.facts,
            probed=self.probed,
            state=self.state,
            why=self.why,
            weight_version=self.weight_version,
            version_checked_at=self.version_checked_at,
            checked_at=self._checked_at,
        )

    def take(self, report: EngineReport) -> None:
        """Takes over what another process saw, unless this one has seen it later."""
        if report.version_checked_at > self.version_checked_at and report.weight_version is not None:
            self._note_version(report.weight_version, report.version_checked_at)
        if report.checked_at <= self._checked_at:
            return
        self._checked_at = report.checked_at
        if not report.probed:
            self._lose(report.why)
            return
        self.kind = next(kind for kind in self._kinds if kind.name == report.facts.kind)
        self.facts, self.probed, self._sampling_known = report.facts, True, report.facts.logprobs_mode != ""
        self._set_state(report.state, report.why)
        self.review()

    async def version_after(self) -> int | None:
        """The version of what it has sampled, from a question that began after this call; None if it does not tell."""
        if not self.facts.weight_versions:
            return None
        asked_at = time.monotonic()
        await self._asking_version.fresh()
        if self.version_checked_at < asked_at or self.weight_version is None:
            return None
        return sampled_by(self.weight_version)

    @property
    def oldest_version(self) -> int | None:
        """No token of a call that begins now is older; None if nobody knows."""
        return None if self.weight_version is None else sampled_by(self.weight_version)

    @property
    def is_changing(self) -> bool:
        """The engine's weights are being changed, or a change of them failed."""
        return self.weight_version is not None and self.weight_version.startswith(CHANGING)

    @property
    def reported_version(self) -> int | None:
        """The version that the pool is told: 0 are the weights that it was started with, None is unknown."""
        is_known = self.weight_version is not None or not self.facts.weight_versions
        if not self.facts.reports_version or not is_known or self.is_changing or self.state is EngineState.PAUSED:
            return None
        return self.version or 0

    @property
    def why_it_awaits_sync(self) -> str:
        """The reason why the engine gets no calls, if that needs a weight sync that has not begun, or another policy
        version; else empty."""
        is_waiting = self.state is EngineState.UNSYNCED and not self.is_changing and self._policy_version() is not None
        return self._why_unsynced() if is_waiting else ""

    @property
    def has_unknown_weights(self) -> bool:
        """The engine has sampled with weights that nobody knows."""
        return self.weight_version == CHANGING

    async def watch(self) -> None:
        """Checks it at intervals, until cancelled."""
        while True:
            await self.check()
            calls_wait = self.state in (EngineState.PAUSED, EngineState.UNSYNCED)
            await asyncio.sleep(PAUSED_WATCH_INTERVAL if calls_wait else WATCH_INTERVAL)

    def close(self) -> None:
        self._checking.close()
        self._asking_version.close()

    async def _check(self) -> None:
        began = time.monotonic()
        try:
            if not self.probed:
                self.kind, self.facts = await probe_engine(self._http, self._kinds)
                self._sampling_known, self._probe_sampling_at = False, 0.0
            await self.kind.check_health(self._http)
        except EngineUnavailable as failure:
            self.set_down(str(failure))
            return
        self.probed = True
        if await self._is_paused():
            self._checked_at = began
            self._set_state(EngineState.PAUSED)
            return
        if not self._sampling_known and began >= self._probe_sampling_at:
            await self._probe_sampling()
        await self.version_after()  # after the pause and before new calls, so none of their tokens is older
        why, self._checked_at = self._why_unsynced(), began
        self._set_state(EngineState.UNSYNCED if why else EngineState.HEALTHY, why)

    async def _is_paused(self) -> bool:
        """An engine that does not answer keeps its state."""
        answer = await self.kind.is_paused(self._http) if self.facts.pause else False
        return self.state is EngineState.PAUSED if answer is None else answer

    def review(self) -> None:
        """Marks the replica as unsynced if its version was withdrawn since the last check."""
        if self.state is EngineState.HEALTHY and self.version in self._withdrawn():
            self._set_state(EngineState.UNSYNCED, self._why_unsynced())

    def _why_unsynced(self) -> str:
        if self.version is not None and self.version in self._withdrawn():
            return (
                f"its weights are version {self.version}, which was refused or rolled back: it waits for a weight sync"
            )
        if self.version is not None or not self.facts.reports_version:
            return ""
        if self.is_changing:
            return "its weights are being changed, or a change failed: it waits for a weight sync"
        newest = self._policy_version()
        if newest == 0:
            return ""
        if newest is None:
            return "the pool has not told its policy version yet"
        if not self.facts.weight_versions:
            return f"it does not tell the version of its weights: {self.kind.advice['weight_versions']}"
        return (
            f"its weights are {self.weight_version!r}, and the pool's version is {newest}: it waits for a weight sync"
        )

    async def _probe_sampling(self) -> None:
        try:
            self.facts = await self.kind.probe_sampling(self._http, self.facts)
        except EngineUnavailable as failure:  # an engine that has just started may need longer for its first tokens
            log.info("engine %s is probed again for what it samples: %s", self.address, failure)
            self._probe_sampling_at = time.monotonic() + SAMPLING_INTERVAL
            return
        self._sampling_known = True
        for missing in missing_capabilities(self.kind, self.facts):
            log.warning("engine %s: %s", self.address, missing)

    async def _ask_version(self) -> None:
        asked_at = time.monotonic()
        version = await self.kind.weight_version(self._http)
        if version is not None:
            self._note_version(version, asked_at)

    def _note_version(self, version: str, asked_at: float) -> None:
        is_new = version != self.weight_version
        self.weight_version, self.version_checked_at = version, asked_at
        self.version = int(version) if version.isdecimal() else None
        if is_new:
            self._on_change()

    def _set_state(self, state: EngineState, why: str = "") -> None:
        if (self.state, self.why) == (state, why):
            return
        self.state, self.why, self.state_since = state, why, time.monotonic()
        is_passing = self.is_changing or self._policy_version() is None
        is_wrong = state is EngineState.DOWN or (state is EngineState.UNSYNCED and not is_passing)
        level = logging.WARNING if is_wrong else logging.INFO
        log.log(level, "engine %s is %s%s", self.address, state, why and f": {why}")
        self._on_change()
