"""What a process of agents is to do, as it is told on its command line."""

import json
from dataclasses import asdict, dataclass
from typing import Self


@dataclass(frozen=True, slots=True, kw_only=True)
class Orders:
    task: str
    seed: int
    engine: str
    """Its address."""
    tokenizer: str
    """The folder of the model."""
    data_pool_name: str
    ray_address: str
    ray_namespace: str
    concurrency: int = 64

    @classmethod
    def from_json(cls, text: str) -> Self:
        return cls(**json.loads(text))

    def to_json(self) -> str:
        return json.dumps(asdict(self))
