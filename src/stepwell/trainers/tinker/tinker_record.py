"""What is known of a run on a Tinker service beside the weights, which the service keeps.

Invariants:
- The file names a state that the service has saved, and what was trained is in that state, and nothing else is.
- The file is whole or absent, at whatever moment the process dies.
- A lease is acknowledged after the file that has it is on disk.
"""

import json
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path

from stepwell.common.atomic_files import replacing_file
from stepwell.errors import BadRequest

FILE = "tinker.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class TinkerRecord:
    base_model: str
    channel: str
    state: str
    """The service's name of the saved weights and optimizer: tinker://…"""
    update: int
    version: int
    leases: list[tuple[str, str]]
    """Trained, and not acknowledged when this was written."""
    trajectories: list[str]
    """The last trained ones, the oldest first."""
    statistics: dict[str, list[float]] = field(default_factory=dict)


def write_record(folder: Path, record: TinkerRecord) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with replacing_file(folder / FILE) as file:
        file.write(json.dumps(asdict(record)).encode())


def read_record(folder: Path) -> TinkerRecord | None:
    """None if there is none yet."""
    path = folder / FILE
    if not path.exists():
        return None
    values = json.loads(path.read_bytes())
    if not isinstance(values, dict) or values.keys() != {of.name for of in fields(TinkerRecord)}:
        raise BadRequest(f"{path} is not the record of a run; name another folder to start anew")
    leases = [(str(shard), str(lease)) for shard, lease in values["leases"]]
    return TinkerRecord(**values | {"leases": leases})
