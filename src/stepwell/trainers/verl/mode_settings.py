"""The settings of verl's trainer mode `stepwell`, and which of verl's own settings it cannot work with."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from stepwell.errors import BadRequest
from stepwell.pool.client import DataPool, connect
from stepwell.trainers.settings import FeedSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolModeSettings(FeedSettings):
    """`trainer.v1.stepwell` in verl's configuration."""

    pool: str = "data_pool"
    namespace: str = "default"
    """The Ray namespace of the pool."""
    max_row_tokens: int | None = None
    """Longer rows are left out."""
    parameter_sync_step: int = 1
    """Updates between two syncs of the engines' weights: verl divides a step's groups among them."""
    weights: str | None = None
    """The folder through which weights reach the engines; they must see it under the same path. It must be set."""
    engines: tuple[str, ...] = ()
    """Addresses of engines that are not in the pool's list."""
    tolerance: float | None = None
    """How far the log-probabilities of engines and trainer may differ; if it is not set, the engine's dtype decides."""

    def __post_init__(self) -> None:
        FeedSettings.__post_init__(self)
        if self.weights is None:
            raise BadRequest("set trainer.v1.stepwell.weights: the folder through which weights reach the engines")


def read_mode_settings(section: Mapping[str, Any]) -> PoolModeSettings:
    """An unknown key is an error."""
    known = {of.name for of in fields(PoolModeSettings)}
    given = {str(name): value for name, value in section.items()}
    if unknown := sorted(given.keys() - known):
        raise BadRequest(f"trainer.v1.stepwell has no {', '.join(unknown)}; it has: {', '.join(sorted(known))}")
    engines = given.pop("engines", None) or ()
    return PoolModeSettings(**given, engines=tuple(str(engine) for engine in engines))


def require_usable(config: Mapping[str, Any]) -> None:
    """BadRequest if verl is to do something that cannot be done with rollouts of agents."""

    def at(path: str) -> Any:
        value: Any = config
        for name in path.split("."):
            value = value.get(name) if value is not None else None
        return value

    def refuse(is_wrong: object, text: str) -> None:
        if is_wrong:
            raise BadRequest(text)

    refuse(
        at("algorithm.adv_estimator") != "grpo" or at("critic.enable"),
        "set algorithm.adv_estimator=grpo and no critic: the mode stepwell itself computes the advantages of whole "
        "rollouts (trainer.v1.stepwell.baseline, advantage, credit)",
    )
    refuse(
        at("algorithm.use_kl_in_reward"),
        "algorithm.use_kl_in_reward changes rewards after their advantages are known: use "
        "actor_rollout_ref.actor.use_kl_loss",
    )
    correction = "algorithm.rollout_correction"
    corrects = at(f"{correction}.rollout_is") or at(f"{correction}.rollout_rs")
    refuse(
        at(f"{correction}.bypass_mode") and (corrects or at(f"{correction}.loss_type") not in (None, "ppo_clip")),
        f"with {correction}.bypass_mode, verl's V1 trainer corrects nothing, so rollout_is, rollout_rs and loss_type "
        f"have no effect: set {correction}.bypass_mode=False, with which verl computes the old log-probabilities "
        "itself and applies rollout_is and rollout_rs, or leave them out",
    )
    refuse(
        at("actor_rollout_ref.actor.checkpoint.async_save"),
        "a batch is acknowledged when its checkpoint is on disk: set "
        "actor_rollout_ref.actor.checkpoint.async_save=False, with which nobody knows when that is",
    )
    rank = at("actor_rollout_ref.model.lora.rank") or at("actor_rollout_ref.model.lora_rank") or 0
    refuse(
        rank > 0 and not at("actor_rollout_ref.model.lora.merge"),
        "an adapter reaches the engines merged into the weights: set actor_rollout_ref.model.lora.merge=True",
    )
    refuse(
        (at("trainer.test_freq") or 0) > 0 or at("trainer.val_before_train"),
        "verl cannot validate agents, which run by themselves: set trainer.test_freq=-1 and "
        "trainer.val_before_train=False, and let agents play held-out tasks in a channel of their own",
    )
    refuse(at("trainer.total_training_steps") is None, "set trainer.total_training_steps: a pool has no last epoch")
    longest = at("trainer.v1.stepwell.max_row_tokens") or at("data.max_prompt_length") + at("data.max_response_length")
    actor = "actor_rollout_ref.actor"
    fits = at(f"{actor}.ppo_max_token_len_per_gpu") * (at(f"{actor}.ulysses_sequence_parallel_size") or 1)
    refuse(
        at(f"{actor}.use_dynamic_bsz") and str(at(f"{actor}.strategy")).startswith("fsdp") and fits < longest,
        f"a row may have {longest} tokens (data.max_prompt_length + data.max_response_length), and a micro-batch "
        f"{fits}: set {actor}.ppo_max_token_len_per_gpu={longest}",
    )


def connected_pool(settings: PoolModeSettings) -> DataPool:
    """verl's processes have joined Ray already; it must be the pool's."""
    return connect(settings.pool, namespace=settings.namespace)
