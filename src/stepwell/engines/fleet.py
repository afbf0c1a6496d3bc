"""All engines of a gateway: a call goes to one of them, and to another if the first gives no reply.

- Only addresses that were configured or added are called, at paths that the engine kinds name.
- All gateways of a pool have the same engines: the pool's list, to which each adds those that it was configured with.
- Redirects are not followed.
- A call whose reply has begun is never sent again.
"""

import asyncio
import contextlib
import resource
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any, Protocol, Self, TypeAlias

from stepwell.engines import ENGINES
from stepwell.engines.connections import EngineConnections, EngineUnreached, UnreadableReply
from stepwell.engines.engine import (
    EngineHttp,
    EngineKind,
    EngineRequest,
    EngineTimeouts,
    Generated,
    engine_address,
    failure_text,
)
from stepwell.engines.replica import EngineReplica, EngineReply, EngineState, RefusedReply
from stepwell.engines.routing import EngineSelector, SplitCounts, routing_named
from stepwell.errors import BadRequest, EngineUnavailable, PoolUnavailable
from stepwell.pool.api.policy import Serving
from stepwell.steps.step import IntArray, JsonObject
from stepwell.wire.openai import Sampled, Upstream

FEWEST_CONNECTIONS = 256
NO_ENGINE_BEHIND = (502, 503, 504)
"""The statuses of a proxy that reaches no engine."""
LIST_MODELS = EngineRequest("/v1/models", None)
PUBLISH_RETRY_PAUSE = 1.0
REPORT_INTERVAL = 1.0
"""Seconds between two reports to the pool, if no engine changes."""

MakeRequest: TypeAlias = Callable[[EngineReplica], EngineRequest]


class EngineDirectory(Protocol):
    """The policy version and the list of engines, which all gateways and trainers share."""

    @property
    def serving(self) -> Serving | None:
        """The newest that the pool has reported; None before its first answer."""

    async def serving_after(self, seen: Serving | None) -> Serving:
        """Waits until the pool reports another than `seen`."""

    async def change_engines(self, *, add: tuple[str, ...] = (), remove: tuple[str, ...] = ()) -> None:
        """Engines join and leave, for all gateways and trainers."""

    async def report_engines(self, versions: Mapping[str, int | None]) -> bool | None:
        """Tell the pool which version each engine reports, by address: 0 are the weights that it was started with, None
        is unknown. The answer: whether a trainer lives that syncs weights, True also if the pool cannot be asked; None
        if this process is not known to the pool yet."""


class EngineFleet:
    """Open it with `async with`: its connections belong to one event loop. Its owner runs `watch`."""

    def __init__(
        self,
        addresses: Sequence[str],
        *,
        routing: str = "round_robin",
        api_key: str | None = None,
        kinds: Sequence[EngineKind] = ENGINES,
        timeouts: EngineTimeouts | None = None,
    ) -> None:
        self._timeouts = timeouts or EngineTimeouts()
        self._selector = EngineSelector(routing_named(routing), self._timeouts.hold)
        self._kinds = tuple(kinds)
        self._configured = tuple(addresses)
        self._directory: EngineDirectory | None = None
        self._sync_expected: bool | None = None
        """A trainer lives that syncs weights; None if the pool has not been asked yet."""
        self._key = api_key

    def share(self, directory: EngineDirectory) -> None:
        """Use the policy version, the split of sessions and the engines of a pool. `follow` keeps them up to date."""
        self._directory = directory

    async def follow(self) -> None:
        """Keeps the engines those of the pool's list, sessions on the side where its split puts them, and the pool
        informed of the engines' versions, until cancelled."""
        await asyncio.gather(self._follow_list(), self._follow_policy(), self._report())

    async def _report(self) -> None:
        assert self._directory is not None
        await self._directory.serving_after(None)
        while True:
            answering = [engine for engine in self._selector.engines if engine.state is not EngineState.DOWN]
            versions = {engine.address: engine.reported_version for engine in answering}
            self._sync_expected = await self._directory.report_engines(versions)
            now = time.monotonic()
            is_settled = all(now - engine.state_since >= self._timeouts.unsynced for engine in answering)
            self._selector.set_stuck((self.why_stuck() or "") if is_settled else "")
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._selector.changed(), REPORT_INTERVAL)

    @property
    def is_sync_expected(self) -> bool | None:
        """A trainer lives that syncs weights, or the pool cannot be asked; None if it has not been asked yet."""
        return self._sync_expected

    def why_stuck(self) -> str | None:
        """Why no call is answered, with what to do: all engines wait for weights that nobody brings. None if not so."""
        answering = [engine for engine in self._selector.engines if engine.state is not EngineState.DOWN]
        reasons = [engine.why_it_awaits_sync for engine in answering]
        if self._sync_expected is not False or not reasons or not all(reasons):
            return None
        named = "; ".join(f"{engine.address}: {why}" for engine, why in zip(answering, reasons, strict=True))
        return (
            f"{named}. No trainer is there to sync them. Start the trainer; or, to go on with the weights that the "
            f"engine has, run: stepwell policy set {answering[0].reported_version or 0}"
        )

    async def _follow_policy(self) -> None:
        """No engine is asked anything here: a rollback must not wait for one that does not answer."""
        assert self._directory is not None
        seen = None
        while True:
            seen = await self._directory.serving_after(seen)
            self._selector.set_serving(seen)
            self._selector.set_stuck("")  # another version may have mended it; the next report looks again
            for engine in self._selector.engines:
                engine.review()

    async def _follow_list(self) -> None:
        assert self._directory is not None
        seen, is_published = None, False
        while True:
            seen = await self._directory.serving_after(seen)
            await asyncio.gather(*(e.check() for e in self._selector.engines if e.probed and e.version is None))
            if not is_published or seen.engines is None:  # a pool without a journal loses its list with its process
                try:
                    await self._directory.change_engines(add=tuple(e.address for e in self._selector.engines))
                except PoolUnavailable:
                    seen = None
                    await asyncio.sleep(PUBLISH_RETRY_PAUSE)
                    continue
                is_published = True
            newest = self._directory.serving  # the list may have changed during the checks
            if newest is not None and newest.engines is not None:
                self._adopt(newest.engines)

    async def __aenter__(self) -> Self:
        limits = self._timeouts
        self._calls = EngineConnections(
            self._key, limit=_connections_limit(), connect_timeout=limits.connect, silence=limits.silence
        )
        self._questions = EngineConnections(self._key)
        await asyncio.gather(*(self.add(address) for address in self._configured))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for engine in self._selector.engines:
            engine.close()
        self._calls.close()
        self._questions.close()

    async def send(self, upstream: Upstream, request: Mapping[str, Any], *, sticky: str = "") -> EngineReply:
        """The reply of one engine, as soon as its head is there. Waits while all engines are paused."""
        return await self._send(lambda engine: engine.kind.request(upstream, request, engine.facts), sticky)

    async def send_exact(
        self, request: Mapping[str, Any], prompt_ids: Sequence[int], template: str, *, sticky: str = ""
    ) -> EngineReply:
        """Send a chat whose prompt is these ids. An engine with another template than the one for which they were
        made gets the messages alone."""

        def make_request(engine: EngineReplica) -> EngineRequest:
            if engine.facts.template == template:
                return engine.kind.exact_request(request, prompt_ids, engine.facts)
            return engine.kind.request(Upstream.CHAT, request, engine.facts)

        return await self._send(make_request, sticky)

    @property
    def hold(self) -> float:
        """Seconds for which a call waits while all engines are paused."""
        return self._timeouts.hold

    @property
    def template(self) -> str:
        """The chat template that all engines have; empty if they differ, or cannot take prompts of token ids."""
        templates = {engine.facts.template for engine in self.replicas if engine.probed}
        return templates.pop() if len(templates) == 1 else ""

    @property
    def renders_chat(self) -> bool:
        """All engines render with the code that chat calls run."""
        return all(engine.facts.renders_chat for engine in self.replicas if engine.probed)

    async def render(self, request: Mapping[str, Any], template: str) -> IntArray:
        """The ids of the prompt that engines with this template make of a chat request. Asked also while they are
        paused."""
        able = [engine for engine in self.replicas if engine.probed and engine.facts.template == template]
        if not able:
            raise EngineUnavailable("no engine renders this chat template")
        engine = min(able, key=lambda one: one.in_flight)
        reply = await self._try(engine, lambda one: one.kind.rendering(request, one.facts))
        if isinstance(reply, str):
            raise EngineUnavailable(reply)
        body = await reply.read()
        if reply.status != 200:
            raise EngineUnavailable(f"{engine.address} does not render a prompt ({reply.status})")
        return engine.kind.read_rendered(body)

    async def models(self) -> tuple[int, bytes]:
        """Status and body of one engine's list of models."""
        reply = await self._send(lambda _: LIST_MODELS, samples=False)
        return reply.status, await reply.read()

    async def generate(self, prompt_ids: Sequence[int], sampling: JsonObject) -> Generated | RefusedReply:
        reply = await self._send(lambda engine: engine.kind.generation(prompt_ids, sampling, engine.facts))
        body = await reply.read()
        if reply.status != 200:
            return RefusedReply(reply.status, body)
        facts = reply.engine.facts
        generated = reply.engine.kind.read_generated(body, prompt_ids, facts)
        return replace(generated, version=reply.version_before, logprobs_mode=facts.logprobs_mode)

    async def derender(self, request: Mapping[str, Any], sampled: Sampled) -> dict[str, Any]:
        """The chat message that the tokens of `sampled` spell, as a reply to `request`."""
        reply = await self._send(lambda engine: _derendering(engine, request, sampled), samples=False)
        body = await reply.read()
        if reply.status != 200:
            raise EngineUnavailable(f"{reply.engine.address} cannot tell what its tokens spell ({reply.status})")
        return reply.engine.kind.read_derendered(body, sampled)

    async def count_tokens(self, request: Mapping[str, Any]) -> int | RefusedReply:
        """The tokens of the prompt of a chat request."""
        reply = await self._send(lambda engine: engine.kind.token_count(request, engine.facts), samples=False)
        body = await reply.read()
        return reply.engine.kind.read_token_count(body) if reply.status == 200 else RefusedReply(reply.status, body)

    @property
    def model(self) -> str:
        """The first model of an engine that reports token ids; empty if there is none."""
        return next((engine.facts.model for engine in self.replicas if engine.facts.token_ids), "")

    async def version_after(self, engine: EngineReplica) -> int | None:
        """The engine's version, from a question that began after this call; None if it does not tell."""
        return await engine.version_after()

    async def add(self, address: str) -> None:
        """Returns once it is probed, or known to be down. An address that is already there stays as it is."""
        engine = self._add(engine_address(address))
        if not engine.probed:
            await engine.check()

    async def join(self, address: str) -> None:
        """Add an engine in all gateways of the pool and in the weight sync."""
        address = engine_address(address)
        if self._directory is not None:
            await self._directory.change_engines(add=(address,))
        await self.add(address)

    async def leave(self, address: str) -> None:
        """Remove an engine in all gateways of the pool and in the weight sync. BadRequest if it is not there."""
        leaving = self.find(address)
        if self._directory is not None:  # first: otherwise the pool's list brings it back
            await self._directory.change_engines(remove=(leaving.address,))
        self._drop(leaving)

    async def remove(self, address: str) -> None:
        """Gives the engine no new calls; those in flight continue to their end."""
        self._drop(self.find(address))

    def find(self, address: str) -> EngineReplica:
        address = engine_address(address)
        for engine in self._selector.engines:
            if engine.address == address:
                return engine
        raise BadRequest(f"there is no engine {address}")

    def _drop(self, engine: EngineReplica) -> None:
        """One that has left already is all right."""
        if engine in self._selector.engines:
            self._selector.remove(engine)

    @property
    def replicas(self) -> Sequence[EngineReplica]:
        return self._selector.engines

    @property
    def split_counts(self) -> SplitCounts:
        """How calls were split between the two sides."""
        return self._selector.split_counts

    @property
    def serving(self) -> Serving | None:
        """The pool's last report of the policy; None before, and without a pool."""
        return None if self._directory is None else self._directory.serving

    async def changed(self) -> None:
        """Returns when an engine was added, removed, or has changed its state."""
        await self._selector.changed()

    async def watch(self) -> None:
        """Keeps the states of all engines up to date, also of those added later, until cancelled."""
        watches: dict[EngineReplica, asyncio.Task[None]] = {}
        try:
            while True:
                for engine in self._selector.engines:
                    if engine not in watches:
                        watches[engine] = asyncio.create_task(engine.watch())
                for engine in watches.keys() - set(self._selector.engines):
                    watches.pop(engine).cancel()
                await self._selector.changed()
        finally:
            for watch in watches.values():
                watch.cancel()

    def _add(self, address: str) -> EngineReplica:
        for engine in self._selector.engines:
            if engine.address == address:
                return engine
        http = EngineHttp(self._questions, address, self._timeouts.question)
        engine = EngineReplica(http, self._kinds, self._selector.note_change, self._policy_version, self._withdrawn)
        self._selector.add(engine)
        return engine

    def _policy_version(self) -> int | None:
        if self._directory is None:
            return 0
        serving = self._directory.serving
        return None if serving is None else serving.policy_version

    def _withdrawn(self) -> tuple[int, ...]:
        return () if self.serving is None else self.serving.withdrawn

    def _adopt(self, addresses: Sequence[str]) -> None:
        """The watch probes those that are new."""
        for engine in [engine for engine in self._selector.engines if engine.address not in addresses]:
            self._selector.remove(engine)
        for address in addresses:
            self._add(address)

    async def _send(self, make_request: MakeRequest, sticky: str = "", *, samples: bool = True) -> EngineReply:
        failures: dict[EngineReplica, str] = {}
        while (engine := await self._selector.next(sticky, failures, samples=samples)) is not None:
            if not engine.probed:
                await engine.check()
                if not engine.probed:
                    failures[engine] = engine.why
                continue
            reply = await self._try(engine, make_request)
            if isinstance(reply, EngineReply):
                return reply
            failures[engine] = reply
        reasons = "; ".join(f"{engine.address}: {why}" for engine, why in failures.items())
        raise EngineUnavailable(f"no engine answers: {reasons or 'there is none'}")

    async def _try(self, engine: EngineReplica, make_request: MakeRequest) -> EngineReply | str:
        """The reply; or why there is none, if another engine may be asked."""
        path, body = make_request(engine)
        version = engine.oldest_version
        engine.in_flight += 1
        try:
            response = await self._calls.request(engine.url(path), body)
            if response.status not in NO_ENGINE_BEHIND:
                return EngineReply(engine, response, version)
            response.close()
            return f"answers {response.status}"
        except EngineUnreached as failure:
            engine.set_down(failure_text(failure))
            return engine.why
        except TimeoutError:
            why = f"{engine.address}{path} sent nothing for {self._timeouts.silence:g} s"
            raise EngineUnavailable(why) from None
        except OSError as failure:
            return failure_text(failure)
        except UnreadableReply as failure:
            raise EngineUnavailable(f"{engine.address}{path} cannot be read: {failure_text(failure)}") from None
        finally:
            engine.in_flight -= 1


def _derendering(engine: EngineReplica, request: Mapping[str, Any], sampled: Sampled) -> EngineRequest:
    if not engine.facts.derender:
        how = engine.kind.advice["derender"]
        raise EngineUnavailable(f"{engine.address} cannot tell what its tokens spell: {how}")
    return engine.kind.derender(request, sampled)


def _connections_limit() -> int:
    """An eighth of the files that may be open: the agents' connections need most of them."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return max(FEWEST_CONNECTIONS, files // 8)
