"""RunnableEnv: what the loops and the command line need of an environment. BaseEnv has all of it."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from stepwell.envs.checkpoints import Checkpoints
from stepwell.envs.config import APIServerConfig, BaseEnvConfig
from stepwell.envs.failure_count import FailureCount
from stepwell.envs.output.wandb_tracker import WandbTracker
from stepwell.envs.scored_data import Groups, Item
from stepwell.envs.servers import ServerManager


class RunnableEnv(Protocol):
    """The methods are described where an author finds them, in BaseEnv."""

    name: str
    server_configs: tuple[APIServerConfig, ...]
    server: ServerManager
    curr_step: int
    backlog: list[Item]
    items_in_progress: dict[int, Item]
    groups_delivered: int
    failure_count: FailureCount
    wandb: WandbTracker
    checkpoints: Checkpoints | None

    def __init__(self, config: BaseEnvConfig, server_configs: Sequence[APIServerConfig]) -> None: ...

    @classmethod
    def config_init(cls) -> tuple[BaseEnvConfig, APIServerConfig | Sequence[APIServerConfig]]: ...

    @property
    def config(self) -> BaseEnvConfig: ...

    @property
    def tokenizer(self) -> Any: ...

    async def setup(self) -> None: ...

    async def get_next_item(self) -> Item: ...

    async def collect_trajectories(self, item: Item) -> tuple[Any, list[Item]]: ...

    async def postprocess_histories(self, trajectories: Any) -> Groups: ...

    async def evaluate(self) -> Mapping[str, float] | None: ...

    async def cleanup(self) -> None: ...

    async def wandb_log(self, wandb_metrics: Mapping[str, Any] | None = None) -> None: ...

    def save_checkpoint(self, step: int) -> None: ...

    def load_checkpoint(self) -> None: ...
