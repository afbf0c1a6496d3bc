"""BaseEnv: what an environment is made from. A subclass says what its items are and how one is rolled out and scored.

What always holds: everything here may be called, and most of it replaced, by the subclass; when it is called, and what
becomes of its failures, is the business of life.py and work.py. Nothing is loaded or opened before it is needed.
"""

import asyncio
import json
import logging
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any, ClassVar, TypeVar

from stepwell.common.tokenizers import load_tokenizer
from stepwell.envs.checkpoints import Checkpoints
from stepwell.envs.collection import collect
from stepwell.envs.config import APIServerConfig, BaseEnvConfig
from stepwell.envs.loop.failure_count import Tally
from stepwell.envs.output.wandb_tracker import Tracker
from stepwell.envs.scored_data import Item, ScoredDataGroup, ScoredDataItem, gather
from stepwell.envs.servers import ServerManager
from stepwell.errors import BadRequest

log = logging.getLogger("stepwell.envs")

T = TypeVar("T")
R = TypeVar("R")

Groups = ScoredDataGroup | list[ScoredDataGroup | None] | None


class BaseEnv(ABC):
    name: str = ""
    """At the rollout server, in logs and in checkpoints, where config.wandb_name does not say another."""
    env_config_cls: ClassVar[type[BaseEnvConfig]] = BaseEnvConfig
    checkpoint_fields: ClassVar[tuple[str, ...]] = ()
    """Attributes that a checkpoint keeps; JSON must be able to hold them."""

    def __init__(self, config: BaseEnvConfig, server_configs: Sequence[APIServerConfig]) -> None:
        self.config = config
        self.name = config.wandb_name or type(self).name or type(self).__name__
        self.server_configs = tuple(server_configs)
        self.server = ServerManager(server_configs)
        """What to sample from."""
        self.curr_step = 0
        """The trainer's step."""
        self.backlog: list[Item] = []
        """Items that come before those of get_next_item, the first first."""
        self.under_way: dict[int, Item] = {}
        """Items whose groups are not delivered yet, by the number of their worker."""
        self.tally = Tally()
        self.wandb = Tracker(config.num_rollouts_to_keep)
        self.checkpoints: Checkpoints | None = None
        """Where checkpoints are kept; None where there is no rollout server to say where."""

    # -- what a subclass writes ----------------------------------------------------------------------------------------

    @classmethod
    def config_init(cls) -> tuple[BaseEnvConfig, APIServerConfig | Sequence[APIServerConfig]]:
        """The defaults of the command line."""
        return cls.env_config_cls(), [APIServerConfig()]

    async def setup(self) -> None:  # noqa: B027 - not every environment has something to set up
        """Called once, before everything else: load the dataset, open what must be open."""

    @abstractmethod
    async def get_next_item(self) -> Item:
        """The next thing to roll out. None: there is none now; once nothing is under way either, the work is over."""

    async def collect_trajectory(self, item: Item) -> tuple[ScoredDataItem | None, list[Item]]:
        """One rollout of the item, or None if it came to nothing; and items to put into the backlog."""
        raise NotImplementedError(f"{type(self).__name__} has neither collect_trajectory nor collect_trajectories")

    async def collect_trajectories(self, item: Item) -> tuple[Any, list[Item]]:
        """The item's group, several groups in a list, or None; and items to put into the backlog.

        As it stands: config.group_size times collect_trajectory, at the same time. Whatever else is returned here,
        postprocess_histories must make groups of.
        """
        collected = await collect(self.collect_trajectory, item, self.config.group_size)
        if len(collected.rollouts) == self.config.group_size:
            return gather(collected.rollouts), collected.backlog
        if collected.failure is not None:
            raise collected.failure
        return None, collected.backlog

    async def postprocess_histories(self, trajectories: Any) -> Groups:
        """The last word on what collect_trajectories gave, before it is sent."""
        groups: Groups = trajectories
        return groups

    async def evaluate(self, *args: Any, **kwargs: Any) -> Mapping[str, float] | None:
        """Called every config.steps_per_eval steps. What it returns is logged."""
        return None

    async def cleanup(self) -> None:  # noqa: B027 - nor to clean up
        """Called after each item, however it went."""

    # -- what a subclass uses, and may extend --------------------------------------------------------------------------

    @cached_property
    def tokenizer(self) -> Any:
        """The Hugging Face tokenizer, loaded when first asked for."""
        names = [server.tokenizer_name or server.model_name for server in self.server_configs]
        if not (self.config.tokenizer_name or names):
            raise BadRequest("the environment has no tokenizer: set --env.tokenizer-name")
        return load_tokenizer(self.config.tokenizer_name or names[0])

    async def evaluate_each(self, function: Callable[[T], Awaitable[R]], samples: Iterable[T]) -> list[R]:
        """What the function gives for each sample, at most config.max_eval_workers of them at the same time."""
        slots = asyncio.Semaphore(self.config.max_eval_workers)

        async def one(sample: T) -> R:
            async with slots:
                return await function(sample)

        return await asyncio.gather(*map(one, samples))

    async def wandb_log(self, wandb_metrics: Mapping[str, Any] | None = None) -> None:
        """Called after training steps and evaluations. Add what you measure and call this one last."""
        counts = {f"dropped/{cause.replace(' ', '_')}": count for cause, count in self.tally.dropped.items()}
        self.wandb.log({"train/groups_sent": self.tally.delivered, **counts, **(wandb_metrics or {})}, self.curr_step)

    def checkpoint_data(self) -> dict[str, Any]:
        """What a checkpoint keeps, by attribute: those of checkpoint_fields."""
        return {name: getattr(self, name) for name in self.checkpoint_fields}

    def save_checkpoint(self, step: int, data: dict[str, Any] | None = None) -> None:
        """Called at the trainer's interval, and at the end. Items not delivered yet are kept as the backlog."""
        if self.checkpoints is None:
            return
        kept = self.checkpoint_data() if data is None else dict(data)
        items = [item for item in (*self.under_way.values(), *self.backlog) if _survives(item)]
        if items:
            kept.setdefault("backlog", items)
        if kept:
            log.info("checkpoint: %s", self.checkpoints.write(step, kept))

    def load_checkpoint(self) -> None:
        """Called on registration at a step above 0: attributes become what the newest checkpoint says."""
        path = self.checkpoints and self.checkpoints.newest(self.curr_step)
        if not path:
            return
        for name, value in json.loads(path.read_text(encoding="utf-8")).items():
            setattr(self, name, value)
        log.info("restored from %s", path)

    @classmethod
    def cli(cls) -> None:
        """The command line: serve, process or evaluate."""
        from stepwell.envs.cli import main

        main(cls)


def _survives(item: Item) -> bool:
    """Would JSON give it back as it is?"""
    try:
        return bool(json.loads(json.dumps(item)) == item)
    except (TypeError, ValueError):
        return False
