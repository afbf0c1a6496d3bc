"""What `up` starts: the settings of every part, made from its own settings and from what the engine reports.

- A part gets only settings that its own command has too.
- If a setting cannot be found out, the error names its flag.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Self

from stepwell.config.pool import PoolSettings
from stepwell.config.rewards import RewardSettings
from stepwell.config.sections import Section
from stepwell.config.serving import DashboardSettings, GatewaySettings
from stepwell.config.up import UpSettings, layered
from stepwell.errors import BadRequest
from stepwell.up.engine_model import ServedModel, tokenizer_of
from stepwell.up.state_folder import StateFolder

HOST = "127.0.0.1"
PORT = 8100
SESSION_IDLE = 300.0
"""Seconds without a call after which a session is completed: nobody else ends those of a plain client."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchPlan:
    pool: PoolSettings
    gateway: GatewaySettings
    dashboard: DashboardSettings
    rewards: RewardSettings | None

    def on(self, ray_address: str) -> Self:
        """The same plan for the cluster at that address."""
        there = {"ray_address": ray_address}
        return replace(
            self,
            pool=self.pool.model_copy(update=there),
            gateway=self.gateway.model_copy(update=there),
            dashboard=self.dashboard.model_copy(update=there),
            rewards=self.rewards and self.rewards.model_copy(update=there),
        )


def make_plan(settings: UpSettings, model: ServedModel, folder: StateFolder, key: str) -> LaunchPlan:
    pool = _pool(settings, folder)
    rewards = _rewards(settings, pool, tokenizer_of(model)) if settings.reward else None
    gateway = _gateway(settings, model, folder, pool, rewards, key)
    return LaunchPlan(pool=pool, gateway=gateway, dashboard=_dashboard(settings, gateway, folder, key), rewards=rewards)


def url_of(settings: GatewaySettings | DashboardSettings) -> str:
    """The address for clients on this machine."""
    host = HOST if settings.host in ("0.0.0.0", "::") else settings.host
    return f"{settings.scheme}://{host}:{settings.port}"


def environment(settings: Section) -> dict[str, str]:
    """The settings as environment variables of the command, which a list of processes does not show."""
    prefix = settings.model_config.get("env_prefix", "")
    given = settings.model_dump(exclude_none=True)
    return {f"{prefix}{name}".upper(): _as_text(value) for name, value in given.items()}


def _pool(settings: UpSettings, folder: StateFolder) -> PoolSettings:
    given = {
        "ray_namespace": settings.ray_namespace,
        "group_size": settings.group_size,
        "max_staleness": settings.max_staleness,
        "session_idle": settings.session_idle,
        "require_reward": True if settings.reward else None,
    }
    otherwise = {"journal": str(folder.journal), "session_idle": SESSION_IDLE}
    return layered(PoolSettings, "pool", given=given, file=settings.pool, otherwise=otherwise)


def _gateway(
    settings: UpSettings,
    model: ServedModel,
    folder: StateFolder,
    pool: PoolSettings,
    rewards: RewardSettings | None,
    key: str,
) -> GatewaySettings:
    given = {
        **_common(settings, pool),
        "vllm_addresses": settings.engine,
        "tokenizer_path": settings.tokenizer_path,
        "prompt_length": settings.prompt_length,
        "response_length": settings.response_length,
        "reward_worker_name": rewards and rewards.name,
        "control_keys": (key,),
        "atropos": settings.atropos or None,
        "host": settings.host,
        "port": settings.port,
    }
    otherwise = {
        "tokenizer_path": tokenizer_of(model),
        "prompt_length": model.window,
        "response_length": model.window,
        "host": HOST,
        "port": PORT,
        "spool": str(folder.spool),
        "atropos_state": str(folder.atropos),
        "keys_file": str(folder.issued_keys),
    }
    _require_lengths_and_tokenizer(settings, model, otherwise)
    return layered(GatewaySettings, "gateway", given=given, file=settings.gateway, otherwise=otherwise)


def _require_lengths_and_tokenizer(settings: UpSettings, model: ServedModel, found: Mapping[str, object]) -> None:
    wanted = ("tokenizer_path", "prompt_length", "response_length")
    missing = [
        name
        for name in wanted
        if found[name] is None and getattr(settings, name) is None and name not in settings.gateway
    ]
    if missing:
        where = f", and its model is in {model.root}, which is not on this machine" if model.root else ""
        flags = ", ".join(f"--{name.replace('_', '-')}" for name in missing)
        raise BadRequest(
            f"the engine at {settings.engine[0]} does not report everything that is needed{where}; give {flags}"
        )


def _dashboard(settings: UpSettings, gateway: GatewaySettings, folder: StateFolder, key: str) -> DashboardSettings:
    given = {
        "ray_namespace": settings.ray_namespace,
        "data_pool_name": gateway.data_pool_name,
        "gateways": (url_of(gateway),),
        "control_keys": (key,),
        "host": settings.host,
        "port": settings.dashboard_port,
    }
    otherwise = {
        "tokenizer_path": gateway.tokenizer_path,
        "host": HOST,
        "keys_file": str(folder.issued_keys),
    }
    return layered(DashboardSettings, "dashboard", given=given, file=settings.dashboard, otherwise=otherwise)


def _rewards(settings: UpSettings, pool: PoolSettings, tokenizer: str | None) -> RewardSettings:
    given = {**_common(settings, pool), "function": settings.reward}
    otherwise = {"tokenizer_path": settings.tokenizer_path or tokenizer}
    return layered(RewardSettings, "rewards", given=given, file=settings.rewards, otherwise=otherwise)


def _common(settings: UpSettings, pool: PoolSettings) -> dict[str, object]:
    return {"ray_namespace": settings.ray_namespace, "data_pool_name": pool.name}


def _as_text(value: object) -> str:
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
