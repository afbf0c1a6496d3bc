"""A rollout server in memory, with a trainer that takes a batch when told to, and switches that make it fail."""

import asyncio
import contextlib
import gzip
from collections.abc import AsyncIterator
from typing import Any
from uuid import uuid4

import orjson
from aiohttp import web


class FakeRolloutServer:
    def __init__(self, **trainer: Any) -> None:
        self.trainer = {"batch_size": 8, "max_token_len": 64, "num_steps": 100, "save_checkpoint_interval": 0} | trainer
        self.url = ""
        self.step = self.trainer.get("starting_step", 0)
        self.has_trainer = True
        self.queue: list[dict[str, Any]] = []
        self.taken: list[dict[str, Any]] = []
        """Every group, once."""
        self.posts: list[str] = []
        """The name of every group that was posted, as often as it was."""
        self.envs: list[dict[str, Any]] = []
        self.registrations = 0
        """Attempts to register."""
        self.status_calls = 0
        self.disconnected: list[int] = []
        self.most_waiting = 0
        self.unallocated_fraction = 1.0

        self.is_away = False
        """Breaks every connection off."""
        self.fails = 0
        """Posts still to answer with 500."""
        self.loses_answers = 0
        """Posts still to take and then not to answer."""
        self.refuses = False
        """Answers posts with 422."""
        self.is_open = asyncio.Event()
        """Posts wait for it."""
        self.is_open.set()

    def train(self, batches: int = 1) -> None:
        """As a trainer does: take whole batches, oldest groups first."""
        for _ in range(batches):
            sequences = 0
            while sequences < self.trainer["batch_size"]:
                sequences += len(self.queue.pop(0)["tokens"])
            self.step += 1

    def has_batch(self) -> bool:
        return sum(len(group["tokens"]) for group in self.queue) >= int(self.trainer["batch_size"])

    def forget(self) -> None:
        """As a restart without any state."""
        self.envs.clear()

    @contextlib.asynccontextmanager
    async def opened(self) -> AsyncIterator["FakeRolloutServer"]:
        app = web.Application(middlewares=[self._presence])
        app.add_routes(
            [
                web.get("/", self._root),
                web.post("/register-env", self._register),
                web.post("/disconnect-env", self._disconnect),
                web.get("/info", self._info),
                web.get("/wandb_info", self._wandb_info),
                web.get("/status-env", self._status),
                web.post("/scored_data", self._scored),
                web.post("/scored_data_list", self._scored_list),
            ]
        )
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        try:
            yield self
        finally:
            await runner.cleanup()

    @web.middleware
    async def _presence(self, request: web.Request, handler: Any) -> web.StreamResponse:
        if self.is_away:
            return self._broken_off(request)
        response: web.StreamResponse = await handler(request)
        return response

    def _broken_off(self, request: web.Request) -> web.Response:
        assert request.transport is not None
        request.transport.close()
        return web.Response()

    async def _root(self, request: web.Request) -> web.Response:
        return web.json_response({"message": "AtroposLib API"})

    async def _register(self, request: web.Request) -> web.Response:
        self.registrations += 1
        if not self.has_trainer:
            return web.json_response({"status": "wait for trainer to start"})
        wanted = await request.json()
        same = sum(env["desired_name"] == wanted["desired_name"] for env in self.envs)
        self.envs.append(wanted)
        return web.json_response(
            {
                "status": "success",
                "env_id": len(self.envs) - 1,
                "wandb_name": f"{wanted['desired_name']}_{same}",
                "checkpoint_dir": str(self.trainer.get("checkpoint_dir", "")),
                "starting_step": self.step,
                "checkpoint_interval": self.trainer["save_checkpoint_interval"],
                "num_steps": self.trainer["num_steps"],
            }
        )

    async def _disconnect(self, request: web.Request) -> web.Response:
        self.disconnected.append((await request.json())["env_id"])
        return web.json_response({"status": "success"})

    async def _info(self, request: web.Request) -> web.Response:
        return web.json_response({key: self.trainer[key] for key in ("batch_size", "max_token_len")})

    async def _wandb_info(self, request: web.Request) -> web.Response:
        return web.json_response({"group": "group", "project": "project"})

    async def _status(self, request: web.Request) -> web.Response:
        self.status_calls += 1
        env_id = (await request.json())["env_id"]
        if env_id >= len(self.envs):
            return web.json_response({"status": "failure", "error": "unknown env_id"})
        own = sum(group["env_id"] == env_id for group in self.queue)
        return web.json_response(
            {
                "current_step": self.step,
                "queue_size": len(self.queue),
                "self_queue_size": own,
                "unallocated_fraction": self.unallocated_fraction,
                "max_group_size": 4,
                "env_weight": 1.0,
            }
        )

    async def _scored(self, request: web.Request) -> web.Response:
        body = await request.read()  # aiohttp has inflated it
        name = request.headers.get("Idempotency-Key") or uuid4().hex  # atroposlib sends none
        self.posts.append(name)
        await self.is_open.wait()
        if self.refuses:
            return web.json_response({"detail": "scores: no"}, status=422)
        if self.fails:
            self.fails -= 1
            return web.json_response({"detail": "a bad moment"}, status=500)
        if self.posts.count(name) == 1 or all(group["name"] != name for group in self.taken):
            self._take(name, body)
        if self.loses_answers:
            self.loses_answers -= 1
            return self._broken_off(request)
        return web.json_response({"status": "received"})

    async def _scored_list(self, request: web.Request) -> web.Response:
        """As atroposlib sends several groups of one item."""
        for group in orjson.loads(await request.read()):
            self._take(uuid4().hex, orjson.dumps(group))
        return web.json_response({"status": "received"})

    def _take(self, name: str, body: bytes) -> None:
        raw = gzip.decompress(body) if body[:2] == b"\x1f\x8b" else body
        group = {**orjson.loads(raw), "name": name}
        self.taken.append(group)
        self.queue.append(group)
        self.most_waiting = max(self.most_waiting, len(self.queue))
