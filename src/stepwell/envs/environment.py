"""Environment: what the loops and the command line run. Authors subclass BaseEnv, which adds the command line.

- A subclass may call everything here, and may replace most of it. envs/loop decides when a method is called and handles
  its failures.
- Nothing is loaded or opened before it is needed.
"""

import asyncio
import json
import logging
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any, ClassVar, Self, TypeAlias, TypeVar

from stepwell.common.tokenizers import load_tokenizer
from stepwell.envs.config import (
    APIServerConfig,
    BaseEnvConfig,
    EnvFlags,
    EnvSettings,
    ProcessFlags,
    ServerBaseline,
    as_server_configs,
    unknown_settings,
)
from stepwell.envs.scored_data import Groups, Item, ScoredDataGroup, ScoredDataItem, as_list, gather
from stepwell.envs.servers import ServerManager
from stepwell.envs.servers.server import reasoning_fields
from stepwell.envs.tracking import EnvTracking
from stepwell.errors import BadRequest

log = logging.getLogger("stepwell.envs")

T = TypeVar("T")
R = TypeVar("R")
Deliver: TypeAlias = Callable[[ScoredDataGroup, Item, bool, bool], Awaitable[None]]
"""A function of a group and its item: whether it is sent, and whether it is dropped if it is too long."""
RollOut: TypeAlias = Callable[[str], Awaitable[Groups]]
CollectOne: TypeAlias = Callable[[Item], Awaitable[tuple[ScoredDataItem | None, list[Item]]]]

TRIES = 2
"""How often a missing rollout of a group is tried."""


class Environment(EnvTracking, ABC):
    name: str = ""
    """The name of the environment at the rollout server, in logs and in checkpoints; config.wandb_name overrides it."""
    env_config_cls: ClassVar[type[BaseEnvConfig]] = BaseEnvConfig
    checkpoint_fields: ClassVar[tuple[str, ...]] = ()
    """Attributes that a checkpoint keeps; their values must be JSON."""

    def __init__(
        self,
        config: BaseEnvConfig,
        server_configs: ServerBaseline | Sequence[APIServerConfig],
        slurm: bool = False,
        testing: bool = False,
    ) -> None:
        """`slurm` and `testing` are accepted as in Atropos and change nothing: the servers are those that are given."""
        super().__init__(config)
        self.name = config.wandb_name or type(self).name or type(self).__name__
        self.server_configs = as_server_configs(server_configs)
        sections = (("env.", config), *(("openai.", server) for server in self.server_configs))
        for note in dict.fromkeys(note for prefix, section in sections for note in unknown_settings(section, prefix)):
            log.warning(note)
        self.server = ServerManager(self.server_configs, reasoning=reasoning_fields(config))
        """The servers to sample from."""
        self.backlog: list[Item] = []
        """Items to roll out before those of get_next_item, in order."""
        self.items_in_progress: dict[int, Item] = {}
        """Items whose groups are not delivered yet, by the number of their task."""
        self.eval_workers: set[asyncio.Task[Any]] = set()
        """Tasks that evaluate() may start; an evaluation ends when they have ended."""
        self.checkpoints: Checkpoints | None = None
        """None without a rollout server, which names the folder."""
        self.deliver: Deliver | None = None
        self.roll_out: RollOut | None = None
        """The rollout function; set while the environment runs."""
        self.process_mode = False
        """Whether the environment runs as `process`."""
        self.start_groups: Callable[[], None] | None = None
        """A function that starts as many groups as there is room for; set while the environment serves."""
        self.status_dict: dict[str, Any] = {}
        """The rollout server's last status."""
        self.env_id: int | None = None
        self.checkpoint_dir = ""
        self.checkpoint_interval = -1
        self.wandb_project: str | None = None
        self.wandb_group: str | None = None
        """The project and the group of W&B that the rollout server named on registration, if W&B is on."""

    @classmethod
    def from_settings(cls, settings: EnvSettings) -> Self:
        """The environment that the command line runs."""
        return cls(settings.env, settings.servers)

    async def close_servers(self) -> None:
        """Called at the end."""
        await self.server.close()

    # -- what a subclass writes ----------------------------------------------------------------------------------------

    @classmethod
    def config_init(cls) -> tuple[BaseEnvConfig, ServerBaseline | Sequence[APIServerConfig]]:
        """The defaults of the command line."""
        return cls.env_config_cls(), ServerBaseline()

    @classmethod
    def get_cli_serve_config_cls(cls) -> type[EnvFlags]:
        """The flags of `serve`, with config_init's result as their defaults. A subclass may return a subclass of them,
        with further flags or its own `run`."""
        return EnvFlags.with_defaults(*cls.config_init())

    @classmethod
    def get_cli_process_config_cls(cls) -> type[EnvFlags]:
        """The same for `process`."""
        return ProcessFlags.with_defaults(*cls.config_init())

    @classmethod
    def get_cli_evaluate_config_cls(cls) -> type[EnvFlags]:
        """The same for `evaluate`."""
        return EnvFlags.with_defaults(*cls.config_init())

    async def setup(self) -> None:
        """Called once, before everything else: load the dataset, open what must be open."""

    @abstractmethod
    async def get_next_item(self) -> Item:
        """The next item to roll out. None: there is none now, and it is asked again; StopAsyncIteration: there are no
        more, and the run ends when nothing is in progress."""

    async def collect_trajectory(self, item: Item) -> tuple[ScoredDataItem | None, list[Item]]:
        """One rollout of the item, or None if it gave no result; and items to add to the backlog."""
        raise NotImplementedError(f"{type(self).__name__} has neither collect_trajectory nor collect_trajectories")

    async def collect_trajectories(self, item: Item) -> tuple[Any, list[Item]]:
        """The item's group, several groups in a list, or None; and items to add to the backlog.

        By default: config.group_size concurrent calls of collect_trajectory. If a subclass returns anything else,
        its postprocess_histories must turn that into groups.
        """
        return await collect_group(self.collect_trajectory, item, self.config.group_size)

    async def postprocess_histories(self, trajectories: Any) -> Groups:
        """The last change of what collect_trajectories returned, before it is sent."""
        groups: Groups = trajectories
        return groups

    async def evaluate(self, *args: Any, **kwargs: Any) -> Mapping[str, float] | None:
        """Called every config.steps_per_eval steps. The result is logged."""
        return None

    async def cleanup(self) -> None:
        """Called after each item, also after a failure."""

    async def add_train_workers(self) -> None:
        """Called in each round of `serve` in which groups may start: starts them. A subclass that makes its groups
        elsewhere leaves it empty."""
        if self.start_groups is not None:
            self.start_groups()

    async def handle_env(self, item_uuid: str) -> Groups:
        """Called for each item, whose name in running_items is given: makes its groups, sends them and returns them."""
        assert self.roll_out is not None, "items are rolled out while the environment runs"
        return await self.roll_out(item_uuid)

    async def env_step_checks(self) -> None:
        """Called in each round of `serve`, before curr_step becomes the step of status_dict."""

    async def evaluate_to_end(self) -> Mapping[str, float] | None:
        """evaluate(), and the tasks that it has put into eval_workers. A result that is no mapping is left out."""
        metrics: object = await self.evaluate()
        while self.eval_workers:
            running = list(self.eval_workers)
            self.eval_workers.difference_update(running)
            await asyncio.gather(*running)
        return metrics if isinstance(metrics, Mapping) else None

    # -- what a subclass uses, and may extend --------------------------------------------------------------------------

    @cached_property
    def tokenizer(self) -> Any:
        """The Hugging Face tokenizer, loaded on first use."""
        names = [server.tokenizer_name or server.model_name for server in self.server_configs]
        if not (self.config.tokenizer_name or names):
            raise BadRequest("the environment has no tokenizer: set --env.tokenizer-name")
        return load_tokenizer(self.config.tokenizer_name or names[0])

    @property
    def running_items(self) -> dict[str, dict[str, Item]]:
        """The items in progress, each below the key `item`, by the names that handle_env gets."""
        return {str(number): {"item": item} for number, item in self.items_in_progress.items()}

    async def server_metrics(self) -> dict[str, Any]:
        metrics: dict[str, Any] = {}
        for place, server in enumerate(self.server.servers):
            metrics = await server.wandb_metrics(metrics, f"server_{place}")
        return metrics

    async def evaluate_each(self, function: Callable[[T], Awaitable[R]], samples: Iterable[T]) -> list[R]:
        """The function's result for each sample, with at most config.max_eval_workers concurrent calls."""
        slots = asyncio.Semaphore(self.config.max_eval_workers)

        async def one(sample: T) -> R:
            async with slots:
                return await function(sample)

        return await asyncio.gather(*map(one, samples))

    async def handle_send_to_api(
        self,
        scored_data: Groups,
        item: Item = None,
        do_send_to_api: bool = True,
        abort_on_any_max_length_exceeded: bool = True,
    ) -> None:
        """Called with the groups of an item: checks, saves and sends them. An author may call it with more groups."""
        assert self.deliver is not None, "groups are sent while the environment runs"
        for group in as_list(scored_data):
            await self.deliver(group, item, do_send_to_api, abort_on_any_max_length_exceeded)

    def checkpoint_data(self) -> dict[str, Any]:
        """The content of a checkpoint, by attribute: those of checkpoint_fields."""
        return {name: getattr(self, name) for name in self.checkpoint_fields}

    def save_checkpoint(self, step: int, data: dict[str, Any] | None = None) -> None:
        """Called at the trainer's interval, and at the end. Items that are not delivered are kept as the backlog."""
        if self.checkpoints is None:
            return
        saved = self.checkpoint_data() if data is None else dict(data)
        items = [item for item in (*self.items_in_progress.values(), *self.backlog) if _is_json(item)]
        if items:
            saved.setdefault("backlog", items)
        if saved:
            log.info("checkpoint: %s", self.checkpoints.write(step, saved))

    def load_checkpoint(self) -> None:
        """Called on registration at a step above 0: sets the attributes from the newest checkpoint."""
        path = self.checkpoints and self.checkpoints.newest(self.curr_step)
        if not path:
            return
        for name, value in json.loads(path.read_text(encoding="utf-8")).items():
            setattr(self, name, value)
        log.info("restored from %s", path)


async def collect_group(collect_one: CollectOne, item: Item, size: int) -> tuple[ScoredDataGroup | None, list[Item]]:
    """The group of the item, and the items for the backlog. If rollouts are missing after every try, the last failure
    is raised; None without a failure."""
    rollouts: list[ScoredDataItem] = []
    backlog: list[Item] = []
    failure: BaseException | None = None
    for _ in range(TRIES):
        missing = size - len(rollouts)
        for result in await asyncio.gather(*(collect_one(item) for _ in range(missing)), return_exceptions=True):
            match result:
                case BaseException():
                    failure = result
                case (None | dict() as rollout, list() as more):
                    backlog += more
                    rollouts += [] if rollout is None else [rollout]  # type: ignore[list-item]
                case _:
                    raise BadRequest(
                        "collect_trajectory returns a rollout (a dictionary with tokens, masks and scores, or None) and"
                        f" a list of items for the backlog, not {str(result)[:200]}; to return anything else, write"
                        " collect_trajectories instead"
                    )
    if len(rollouts) == size:
        return gather(rollouts), backlog
    if failure is not None:
        raise failure
    return None, backlog


def _is_json(item: Item) -> bool:
    """Whether JSON gives the item back unchanged."""
    try:
        return bool(json.loads(json.dumps(item)) == item)
    except (TypeError, ValueError):
        return False
