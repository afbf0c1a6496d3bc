"""What is kept beside a checkpoint of verl, so that a resumed run neither loses nor repeats a group."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from stepwell.common.atomic_files import replacing_file

FILE = "stepwell.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class FeedState:
    version: int
    """The version of the checkpoint's weights in the pool."""
    leases: list[tuple[str, str]]
    """Trained, and not acknowledged when this was written."""
    trajectories: list[str]
    """The last trained ones, the oldest first."""
    statistics: dict[str, list[float]]
    """Of the rewards of earlier batches: RunningStatistics."""


def write_feed_state(folder: Path, state: FeedState) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with replacing_file(folder / FILE) as file:
        file.write(json.dumps(asdict(state)).encode())


def read_feed_state(folder: Path) -> FeedState | None:
    """None for a checkpoint of another trainer mode."""
    if not (folder / FILE).exists():
        return None
    values = json.loads((folder / FILE).read_text())
    return FeedState(**{**values, "leases": [(shard, lease) for shard, lease in values["leases"]]})
