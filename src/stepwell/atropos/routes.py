"""The routes of Atropos' protocol. Each handler serves one channel."""

import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Literal, TypeAlias
from uuid import uuid4

from starlette.responses import Response

from stepwell.atropos.batch_delivery import BatchDelivery, DeliveryRequest, read_lease
from stepwell.atropos.group_intake import GroupIntake, GroupReader
from stepwell.atropos.http import JSON, AtroposRequest, json_response
from stepwell.atropos.registry import AtroposMetrics, Registries
from stepwell.pool.api.leasing import ReadyGroups
from stepwell.pool.client import PoolClient
from stepwell.wire import scored_groups as shapes
from stepwell.wire.scored_groups import NO_EXAMPLE, group_parts
from stepwell.wire.scored_groups_arrow import MEDIA_TYPE, groups_to_arrow

Handler: TypeAlias = Callable[[str, AtroposRequest], Awaitable[Response]]
"""Called with the channel and the request."""


class AtroposRoutes:
    def __init__(self, pool: PoolClient, registries: Registries, metrics: AtroposMetrics) -> None:
        self._pool = pool
        self._registries = registries
        self._reader = GroupReader()
        self._intake = GroupIntake(pool, metrics)
        self._delivery = BatchDelivery(pool, metrics, registries.save)
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
            ("POST", "/reset_data"): self.reset_data,
            ("GET", "/reset_data"): self.reset_data,  # atroposlib's own tools call it so
        }

    # -- registration --------------------------------------------------------------------------------------------------

    async def register(self, channel: str, request: AtroposRequest) -> Response:
        trainer = await request.call(shapes.TrainerRegistration)
        self._registries.open(channel).register(trainer)
        await self._registries.save()
        return Response(b'{"uuid":%d}' % uuid4().int, media_type=JSON)

    async def register_env(self, channel: str, request: AtroposRequest) -> Response:
        wanted = await request.call(shapes.EnvRegistration)
        registry = self._registries.of(channel)
        if registry.trainer is None or not registry.is_started:
            return json_response({"status": "wait for trainer to start"})
        environment = registry.register_env(wanted, self._clock())
        await self._registries.save()
        registered = shapes.EnvRegistered(
            env_id=registry.environments.index(environment),
            wandb_name=environment.name,
            checkpoint_dir=registry.trainer.checkpoint_dir,
            starting_step=registry.step,
            checkpoint_interval=registry.trainer.save_checkpoint_interval,
            num_steps=registry.trainer.num_steps,
        )
        return json_response({"status": "success", **registered.model_dump()})

    async def disconnect_env(self, channel: str, request: AtroposRequest) -> Response:
        env_id = (await request.call(shapes.EnvIdentifier)).env_id
        environment = self._registries.of(channel).heard_from(env_id, self._clock())
        if environment is None:
            return json_response({"status": "failure", "error": f"no environment has the number {env_id}"})
        environment.is_disconnected = True
        await self._registries.save()
        return json_response({"status": "success"})

    async def wandb_info(self, channel: str, _: AtroposRequest) -> Response:
        trainer = self._registries.of(channel).trainer
        group, project = (trainer.wandb_group, trainer.wandb_project) if trainer else (None, None)
        return json_response({"group": group, "project": project})

    async def info(self, channel: str, _: AtroposRequest) -> Response:
        trainer = self._registries.of(channel).trainer
        batch_size, longest = (trainer.batch_size, trainer.max_token_len) if trainer else (-1, -1)
        return json_response({"batch_size": batch_size, "max_token_len": longest})

    async def status(self, channel: str, _: AtroposRequest) -> Response:
        ready = await self._pool.ready_groups(channel)
        status = {"current_step": self._registries.of(channel).step, "queue_size": ready.total_groups}
        return json_response({**status, **_missing(ready)})

    async def status_env(self, channel: str, request: AtroposRequest) -> Response:
        env_id = (await request.call(shapes.EnvIdentifier)).env_id
        registry = self._registries.of(channel)
        environment = registry.heard_from(env_id, self._clock())
        if environment is None:
            return json_response({"detail": f"no environment has the number {env_id}; POST /register-env first"}, 404)
        backlog = await self._pool.ready_groups(channel)
        status = registry.env_status(environment, backlog, self._clock()).model_dump()
        return json_response({**status, **_missing(backlog)})

    # -- environments send ---------------------------------------------------------------------------------------

    async def scored_data(self, channel: str, request: AtroposRequest) -> Response:
        repeated = await self._submit(channel, request, "group")
        return json_response({"status": "received", **({"duplicate": True} if all(repeated) else {})})

    async def scored_data_list(self, channel: str, request: AtroposRequest) -> Response:
        repeated = await self._submit(channel, request, "list")
        result = {"status": "received", "groups_processed": len(repeated)}
        return json_response({**result, **({"duplicates": sum(repeated)} if any(repeated) else {})})

    async def _submit(self, channel: str, request: AtroposRequest, kind: Literal["group", "list"]) -> list[bool]:
        with self._intake.reading():
            groups = await self._reader.read(request, kind)
        key = request.headers.get("idempotency-key")
        return await self._intake.submit(channel, self._registries.of(channel), groups, key, self._clock())

    async def latest_example(self, channel: str, _: AtroposRequest) -> Response:
        group = self._intake.latest.get(channel)
        return json_response(NO_EXAMPLE) if group is None else Response(b"".join(group_parts(group)), media_type=JSON)

    async def reset_data(self, channel: str, _: AtroposRequest) -> Response:
        await self._pool.clear(channel)
        self._registries.reset(channel)
        self._intake.drop(channel)
        await self._registries.save()
        return Response(b"Reset successful", media_type="text/plain")

    # -- trainers fetch --------------------------------------------------------------------------------------------

    async def batch(self, channel: str, request: AtroposRequest) -> Response:
        registry = self._registries.of(channel)
        wanted = shapes.read_call(DeliveryRequest, dict(request.query_params))
        as_arrow = MEDIA_TYPE in request.headers.get("accept", "")
        if registry.trainer is None:
            why = "no trainer is registered; POST /register first"
            return json_response({"status": "error", "message": why, "batch": []})
        if not registry.is_started:
            registry.is_started = True
            await self._registries.save()
        response = await self._delivery.batch(channel, registry, wanted, as_arrow=as_arrow, now=self._clock())
        if response is not None:
            return response
        if as_arrow:
            return Response(groups_to_arrow([]), media_type=MEDIA_TYPE)
        return json_response({"batch": None})

    async def ack(self, channel: str, request: AtroposRequest) -> Response:
        registry = self._registries.of(channel)
        await self._delivery.ack(registry, read_lease((await request.call(shapes.LeaseName)).lease))
        return json_response({"status": "success", "current_step": registry.step})

    async def nack(self, _: str, request: AtroposRequest) -> Response:
        await self._delivery.nack(read_lease((await request.call(shapes.LeaseName)).lease))
        return json_response({"status": "success"})


def _missing(ready: ReadyGroups) -> dict[str, list[str]]:
    """Named only if there are some, so that the answer is Atropos' own otherwise."""
    return {"missing": list(ready.missing)} if ready.missing else {}
