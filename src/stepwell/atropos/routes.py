"""What each call does, by its route: the protocol of Atropos, for one channel at a time."""

import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Literal, TypeAlias
from uuid import uuid4

from stepwell.atropos.batch_delivery import Serving, read_batch_request, read_lease
from stepwell.atropos.group_intake import Taking, read_groups
from stepwell.atropos.http import Answer, LongAnswer, Request, json_answer
from stepwell.atropos.metrics import Sight
from stepwell.atropos.registries import Registries
from stepwell.pool.api.ports import GroupExchange
from stepwell.wire import atropos_calls as shapes
from stepwell.wire.scored_groups_arrow import MEDIA_TYPE, groups_to_arrow
from stepwell.wire.scored_groups_json import NO_EXAMPLE, group_parts

Handler: TypeAlias = Callable[[str, Request], Awaitable[Answer | LongAnswer]]
"""Told the channel."""


class Calls:
    def __init__(self, pool: GroupExchange, registries: Registries, sight: Sight) -> None:
        self._pool = pool
        self._registries = registries
        self._taking = Taking(pool, sight)
        self._serving = Serving(pool, sight, registries.save)
        self._clock = time.monotonic
        self.routes: Mapping[tuple[str, str], Handler] = {
            ("POST", "/register"): self.register,
            ("POST", "/register-env"): self.register_env,
            ("POST", "/disconnect-env"): self.disconnect_env,
            ("GET", "/wandb_info"): self.wandb_info,
            ("GET", "/info"): self.info,
            ("POST", "/scored_data"): self.scored_data,
            ("POST", "/scored_data_list"): self.scored_data_list,
            ("GET", "/batch"): self.batch,
            ("POST", "/batch/ack"): self.ack,
            ("POST", "/batch/nack"): self.nack,
            ("GET", "/status"): self.status,
            ("GET", "/status-env"): self.status_env,
            ("GET", "/latest_example"): self.latest_example,
            ("GET", "/reset_data"): self.reset_data,
        }

    # -- who is there --------------------------------------------------------------------------------------------------

    async def register(self, channel: str, request: Request) -> Answer:
        trainer = shapes.read_call(shapes.TrainerRegistration, await request.body())
        self._registries.open(channel).register(trainer)
        await self._registries.save()
        return Answer(b'{"uuid":%d}' % uuid4().int)

    async def register_env(self, channel: str, request: Request) -> Answer:
        wanted = shapes.read_call(shapes.EnvRegistration, await request.body())
        registry = self._registries.of(channel)
        if registry.trainer is None or not registry.is_started:
            return json_answer({"status": "wait for trainer to start"})
        environment = registry.register_env(wanted, self._clock())
        await self._registries.save()
        return json_answer(
            {
                "status": "success",
                "env_id": environment.env_id,
                "wandb_name": environment.name,
                "checkpoint_dir": registry.trainer.checkpoint_dir,
                "starting_step": registry.step,
                "checkpoint_interval": registry.trainer.save_checkpoint_interval,
                "num_steps": registry.trainer.num_steps,
            }
        )

    async def disconnect_env(self, channel: str, request: Request) -> Answer:
        env_id = shapes.read_call(shapes.EnvIdentifier, await request.body()).env_id
        environment = self._registries.of(channel).hear(env_id, self._clock())
        if environment is None:
            return json_answer({"status": "failure", "error": f"no environment has the number {env_id}"})
        environment.is_disconnected = True
        await self._registries.save()
        return json_answer({"status": "success"})

    async def wandb_info(self, channel: str, _: Request) -> Answer:
        trainer = self._registries.of(channel).trainer
        group, project = (trainer.wandb_group, trainer.wandb_project) if trainer else (None, None)
        return json_answer({"group": group, "project": project})

    async def info(self, channel: str, _: Request) -> Answer:
        trainer = self._registries.of(channel).trainer
        batch_size, longest = (trainer.batch_size, trainer.max_token_len) if trainer else (-1, -1)
        return json_answer({"batch_size": batch_size, "max_token_len": longest})

    async def status(self, channel: str, _: Request) -> Answer:
        return json_answer(self._registries.of(channel).status(await self._pool.backlog(channel)))

    async def status_env(self, channel: str, request: Request) -> Answer:
        env_id = shapes.read_call(shapes.EnvIdentifier, await request.body()).env_id
        registry = self._registries.of(channel)
        environment = registry.hear(env_id, self._clock())
        if environment is None:
            return json_answer({"detail": f"no environment has the number {env_id}; POST /register-env first"}, 404)
        backlog = await self._pool.backlog(channel)
        return json_answer(registry.env_status(environment, backlog, self._clock()))

    # -- what environments bring ---------------------------------------------------------------------------------------

    async def scored_data(self, channel: str, request: Request) -> Answer:
        repeated = await self._take(channel, request, "group")
        return json_answer({"status": "received", **({"duplicate": True} if all(repeated) else {})})

    async def scored_data_list(self, channel: str, request: Request) -> Answer:
        repeated = await self._take(channel, request, "list")
        told = {"status": "received", "groups_processed": len(repeated)}
        return json_answer({**told, **({"duplicates": sum(repeated)} if any(repeated) else {})})

    async def _take(self, channel: str, request: Request, kind: Literal["group", "list"]) -> list[bool]:
        with self._taking.reading():
            groups = await read_groups(request, kind)
        key = request.headers.get("idempotency-key")
        return await self._taking.take(channel, self._registries.of(channel), groups, key, self._clock())

    async def latest_example(self, channel: str, _: Request) -> Answer:
        group = self._taking.latest.get(channel)
        return json_answer(NO_EXAMPLE) if group is None else Answer(b"".join(group_parts(group)))

    async def reset_data(self, channel: str, _: Request) -> Answer:
        await self._pool.clear(channel)
        self._registries.forget(channel)
        self._taking.forget(channel)
        await self._registries.save()
        return Answer(b"Reset successful", content_type="text/plain; charset=utf-8")

    # -- what trainers take --------------------------------------------------------------------------------------------

    async def batch(self, channel: str, request: Request) -> Answer | LongAnswer:
        registry = self._registries.of(channel)
        asked = read_batch_request(request)
        if registry.trainer is None:
            why = "no trainer is registered; POST /register first"
            return json_answer({"status": "error", "message": why, "batch": []})
        if not registry.is_started:
            registry.is_started = True
            await self._registries.save()
        answer = await self._serving.batch(channel, registry, asked, self._clock())
        if answer is not None:
            return answer
        return Answer(groups_to_arrow([]), content_type=MEDIA_TYPE) if asked.as_arrow else json_answer({"batch": None})

    async def ack(self, channel: str, request: Request) -> Answer:
        registry = self._registries.of(channel)
        await self._serving.ack(registry, read_lease(shapes.read_call(shapes.LeaseName, await request.body()).lease))
        return json_answer({"status": "success", "current_step": registry.step})

    async def nack(self, _: str, request: Request) -> Answer:
        await self._serving.nack(read_lease(shapes.read_call(shapes.LeaseName, await request.body()).lease))
        return json_answer({"status": "success"})
