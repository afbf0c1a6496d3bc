"""The rollout server, from an environment's side: `stepwell atropos`, or any server with Atropos' API.

What always holds: a group is sent under one name of its own, however often, so that a server that keeps names takes it
once; a group is either taken by the server, or counted and written to `unsent`. It is a RolloutServerAway where asking
again may help, a RolloutServerRefused where it will not.
"""

import asyncio
import contextlib
import logging
import uuid
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import orjson

from stepwell.common.retry import Backoff, retry_while_unavailable
from stepwell.envs.rollout_server.bodies import Packed, can_pack_arrow, pack
from stepwell.envs.scored_data import ScoredDataGroup
from stepwell.errors import RolloutServerAway, RolloutServerRefused

log = logging.getLogger("stepwell.envs")

ASKED = 30.0
"""Seconds an answer may take."""
TRIED = 60.0
"""Seconds for which a group is sent again while the server is away."""
BACKOFF = Backoff(first=0.1, longest=5.0)
WAITED = 1.0
"""Seconds between two attempts where there is nothing to do but wait."""
WAITING = Backoff(first=WAITED, longest=WAITED)
BUSY = (408, 425, 429)
"""Answers below 500 after which asking again may help."""


@dataclass(frozen=True, slots=True)
class Registration:
    """How the rollout server knows an environment."""

    env_id: int
    wandb_name: str
    checkpoint_dir: str
    starting_step: int
    checkpoint_interval: int
    num_steps: int


@dataclass(frozen=True, slots=True)
class Status:
    current_step: int
    queue_size: int
    self_queue_size: int
    unallocated_fraction: float
    env_weight: float


class RolloutServer:
    """Use it with `async with`."""

    def __init__(
        self, url: str, key: str | None = None, *, unsent: Path = Path("unsent.jsonl"), tried: float = TRIED
    ) -> None:
        self.url = url.rstrip("/")
        self.unsent = 0
        """Groups that were not taken, and stand in the file."""
        self._key = key
        self._unsent_file = unsent
        self._tried = tried
        self._session: aiohttp.ClientSession | None = None
        self._takes_arrow: bool | None = None

    async def __aenter__(self) -> "RolloutServer":
        headers = {"Authorization": f"Bearer {self._key}"} if self._key else {}
        self._session = aiohttp.ClientSession(
            headers=headers, timeout=aiohttp.ClientTimeout(total=ASKED), connector=aiohttp.TCPConnector(limit=0)
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._session is not None:
            await self._session.close()

    async def register_env(self, wanted: Mapping[str, Any]) -> Registration:
        """Waits for the server and its trainer, and says what it waits for."""
        said = ""
        while (answer := await self._ask_patiently("POST", "/register-env", wanted))["status"] != "success":
            if answer["status"] != said:
                log.info("waiting to register: the rollout server at %s says: %s", self.url, answer["status"])
            said = answer["status"]
            await asyncio.sleep(WAITED)
        return Registration(**{name: answer[name] for name in Registration.__slots__})

    async def info(self) -> tuple[int, int]:
        """The trainer's batch_size and max_token_len; -1 where it has none."""
        answer = await self._ask_patiently("GET", "/info")
        return int(answer["batch_size"]), int(answer["max_token_len"])

    async def wandb_info(self) -> tuple[str | None, str | None]:
        """The trainer's project and group."""
        answer = await self._ask_patiently("GET", "/wandb_info")
        return answer["project"], answer["group"]

    async def status(self, env_id: int) -> Status:
        answer = await self._ask("GET", "/status-env", {"env_id": env_id})
        if "current_step" not in answer:
            raise RolloutServerRefused(f"the rollout server knows no environment {env_id}: {answer}")
        return Status(
            current_step=int(answer["current_step"]),
            queue_size=int(answer["queue_size"]),
            self_queue_size=int(answer.get("self_queue_size", 0)),
            unallocated_fraction=float(answer.get("unallocated_fraction", 1.0)),
            env_weight=float(answer.get("env_weight", 1.0)),
        )

    async def disconnect(self, env_id: int) -> None:
        await self._ask("POST", "/disconnect-env", {"env_id": env_id})

    async def send(self, group: ScoredDataGroup, env_id: int | None) -> str:
        """Empty once the server has taken it; else why it was written to `unsent` instead."""
        sent = {**group, "env_id": env_id}
        try:
            await self._send(sent)
        except (RolloutServerAway, RolloutServerRefused) as failure:
            self.unsent += 1
            log.error("a group was not taken and is kept in %s: %s", self._unsent_file, failure)
            await asyncio.to_thread(self._keep, sent)
            return str(failure)
        return ""

    async def _send(self, group: Mapping[str, Any]) -> None:
        name = uuid.uuid4().hex
        packed: Packed | None = None

        async def send_once() -> None:
            nonlocal packed
            if packed is None:
                packed = await asyncio.to_thread(pack, group, arrow=await self._arrow())
            await self._post(packed, name)

        def log_pause(away: RolloutServerAway, pause: float) -> float:
            log.warning("a group is sent again in %.1f s: %s", pause, away)
            return pause

        await retry_while_unavailable(
            send_once, RolloutServerAway, BACKOFF, seconds=self._tried, before_pause=log_pause
        )

    async def _post(self, packed: Packed, name: str) -> None:
        headers = {**packed.headers, "Idempotency-Key": name}
        async with self._answer("POST", "/scored_data", data=packed.body, headers=headers) as answer:
            await answer.read()

    async def _arrow(self) -> bool:
        """Does the server take Arrow? Asked once."""
        if self._takes_arrow is None:
            try:
                self._takes_arrow = can_pack_arrow() and bool((await self._ask("GET", "/")).get("arrow"))
            except RolloutServerRefused:
                self._takes_arrow = False
        return self._takes_arrow

    def _keep(self, group: Mapping[str, Any]) -> None:
        self._unsent_file.parent.mkdir(parents=True, exist_ok=True)
        with self._unsent_file.open("ab") as file:
            file.write(orjson.dumps(group, option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_APPEND_NEWLINE))

    async def _ask_patiently(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """However long the server is away."""
        logged = ""

        def log_once(away: RolloutServerAway, pause: float) -> float:
            nonlocal logged
            if str(away) != logged:
                log.info("waiting: %s", away)
            logged = str(away)
            return pause

        return await retry_while_unavailable(
            lambda: self._ask(method, path, body), RolloutServerAway, WAITING, before_pause=log_once
        )

    async def _ask(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        async with self._answer(method, path, json=body) as answer:
            read = orjson.loads(await answer.read())
        if not isinstance(read, dict):
            raise RolloutServerRefused(f"{self.url}{path} is no rollout server: it answered {str(read)[:200]}")
        return read

    @contextlib.asynccontextmanager
    async def _answer(self, method: str, path: str, **request: Any) -> AsyncIterator[aiohttp.ClientResponse]:
        """An answer that is fine; every other one is a failure with a name."""
        if self._session is None:
            raise RuntimeError("a RolloutServer is used with `async with`")
        try:
            async with self._session.request(method, self.url + path, **request) as answer:
                if answer.status >= 400:
                    raise _refusal(answer.status, f"{self.url}{path}", await answer.text(errors="replace"))
                yield answer
        except (aiohttp.ClientError, TimeoutError, OSError) as failure:
            why = str(failure) or type(failure).__name__
            raise RolloutServerAway(f"the rollout server at {self.url} cannot be reached: {why}") from failure
        except orjson.JSONDecodeError as failure:
            raise RolloutServerRefused(f"{self.url}{path} is no rollout server: it answered no JSON") from failure


def _refusal(status: int, where: str, text: str) -> RolloutServerAway | RolloutServerRefused:
    kind = RolloutServerAway if status >= 500 or status in BUSY else RolloutServerRefused
    return kind(f"{where} answered {status}: {text[:500]}")
