"""A trainer around the client of atroposlib's example trainer, run by the interpreter of its environment.

    python trainer.py URL GROUPS QUEUE_LIMIT FILE

Registers, asks once (which lets environments in), then stays away until the queue is full, and a while longer. Then it
takes batches until it has seen so many different groups. To the file: every group in the order of arrival, and
how long the queue was while nobody took anything.
"""

import json
import sys
import time
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import requests  # type: ignore[import-untyped, unused-ignore]
from example_trainer.api import check_atropos_api, get_batch, register_trainer  # type: ignore[import-not-found]
from example_trainer.config import TrainingConfig  # type: ignore[import-not-found]
from example_trainer.data import pad_data_to_good_offset  # type: ignore[import-not-found]

BATCH_SIZE = 8
AWAY_S = 3.0

Group = dict[str, Any]


def main(url: str, groups: int, queue_limit: int, file: Path) -> None:
    assert check_atropos_api(url)
    register_trainer(
        TrainingConfig(
            model_name="none", batch_size=BATCH_SIZE, gradient_accumulation_steps=1, seq_len=512, atropos_url=url
        )
    )
    assert get_batch(url)["batch"] is None
    while queue_size(url) < queue_limit:
        time.sleep(0.1)
    away = list(watch(url))
    consumed: list[Group] = []
    while len({name_of(group) for group in consumed}) < groups:
        consumed += next_batch(url)
    file.write_text(json.dumps({"groups": consumed, "away": away}))


def queue_size(url: str) -> int:
    answered: int = requests.get(f"{url}/status", timeout=10).json()["queue_size"]
    return answered


def watch(url: str) -> Iterator[int]:
    """The queue's length, again and again while no one takes from it."""
    end = time.monotonic() + AWAY_S
    while time.monotonic() < end:
        yield queue_size(url)
        time.sleep(0.1)


def name_of(group: Group) -> tuple[int, int]:
    return group["group_overrides"]["item"], group["group_overrides"]["part"]


def next_batch(url: str) -> list[Group]:
    """As the example trainer polls, and through its padding into tensors."""
    while (data := get_batch(url))["batch"] is None:
        time.sleep(0.1)
    has_logprobs = all(group["inference_logprobs"] for group in data["batch"])  # it cannot read a null
    (tokens,), (labels,), *_ = pad_data_to_good_offset(deepcopy(data), BATCH_SIZE, has_logprobs)
    assert tokens.shape == labels.shape
    assert len(tokens) == BATCH_SIZE
    batch: list[Group] = data["batch"]
    return batch


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]))
