"""One run of atroposlib's environment and trainer against a server, whoever's that is."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rig.atropos.processes import atropos_python, running
from rig.waiting import wait_until

PROGRAMS = Path(__file__).parent
GROUPS = 24
"""Different ones that the environment makes: of each third item two."""
QUEUE_LIMIT = 8
"""Groups in the queue at which the environment pauses: two batches of eight sequences."""
TIMEOUT_S = 240.0


@dataclass(frozen=True, slots=True)
class Consumed:
    groups: list[dict[str, Any]]
    """In the order in which they were served."""
    away: list[int]
    """How many groups were queued while the trainer was away."""

    def by_name(self) -> dict[tuple[int, int], dict[str, Any]]:
        """One of each name: a group that was served again must be the same."""
        named: dict[tuple[int, int], dict[str, Any]] = {}
        for group in self.groups:
            name = group["group_overrides"]["item"], group["group_overrides"]["part"]
            assert named.setdefault(name, group) == group
        return named


def consume(url: str, tokenizer: Path, folder: Path) -> Consumed:
    """Let the environment serve and the trainer take, until it has had every group."""
    folder.mkdir(exist_ok=True)
    serve = _program("counting_env.py", "serve", "--env.rollout_server_url", url, "--env.tokenizer_name", tokenizer)
    train = _program("trainer.py", url, GROUPS, QUEUE_LIMIT, folder / "consumed.json")
    with running(serve, folder / "env.log") as env, running(train, folder / "trainer.log") as trainer:
        wait_until(lambda: trainer.poll() is not None or env.poll() is not None, "the trainer to end", TIMEOUT_S)
        assert trainer.poll() == 0, (folder / "trainer.log").read_text() + (folder / "env.log").read_text()[-4000:]
    return Consumed(**json.loads((folder / "consumed.json").read_text()))


def _program(name: str, *args: object) -> list[str]:
    return [str(word) for word in (atropos_python(), PROGRAMS / name, *args)]
