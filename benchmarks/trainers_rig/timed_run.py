"""What is measured of one run of a trainer, and the figures that follow from several. Standard library only: programs
in other environments use it too."""

import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

SAME = 1e-3
"""By how much the losses of both runs of a round may differ, as a part of the largest."""

LEARNED = 0.01
"""How much the loss on the same data must have changed, as a part of it, where a program can compute it again."""


@dataclass(frozen=True, slots=True)
class Length:
    rounds: int
    updates: int
    """Measured ones of a round."""
    unmeasured: int = 2
    """Updates before them."""
    groups: int = 16
    """Of an update."""
    group_size: int = 8
    spare: int = 1
    """Updates whose data is there too: trainers fetch ahead."""

    @property
    def all_updates(self) -> int:
        return self.unmeasured + self.updates

    @property
    def all_groups(self) -> int:
        return self.groups * (self.all_updates + self.spare)

    @property
    def samples(self) -> int:
        """Of an update."""
        return self.groups * self.group_size


@dataclass(frozen=True, slots=True)
class TimedRun:
    """The measured updates of one run."""

    samples: int
    seconds: float
    waited: float
    """Seconds of them in which the trainer waited for its data."""
    losses: list[float]
    """Of all updates, from the first one."""

    @property
    def rate(self) -> float:
        return self.samples / self.seconds


class Round(NamedTuple):
    """The same updates on the same rollouts, twice."""

    from_pool: TimedRun
    from_memory: TimedRun


def figures_of(name: str, rounds: Sequence[Round]) -> dict[str, float]:
    """Medians over the rounds. AssertionError if the two runs of a round did not train the same."""
    for both in rounds:
        check_same(name, both)
    return {
        f"{name}_samples_s": statistics.median(both.from_pool.rate for both in rounds),
        f"{name}_from_memory_samples_s": statistics.median(both.from_memory.rate for both in rounds),
        f"{name}_of_memory": statistics.median(both.from_pool.rate / both.from_memory.rate for both in rounds),
        f"{name}_waiting": statistics.median(both.from_pool.waited / both.from_pool.seconds for both in rounds),
    }


def check_same(name: str, both: Round) -> None:
    """Other data, or data in another order, would show in the losses."""
    pool, memory = both.from_pool.losses, both.from_memory.losses
    scale = max(map(abs, memory), default=0.0)
    gaps = [abs(a - b) for a, b in zip(pool, memory, strict=True)]
    assert max(gaps) <= SAME * scale, f"{name} did not train the same: {pool} from the pool, {memory} from memory"
    assert scale > 0, f"{name} trained nothing"
    assert both.from_pool.samples == both.from_memory.samples, name


def tell(rounds: Sequence[Round]) -> None:
    """How a program answers: in the last line that begins with a brace."""
    told = [{"from_pool": asdict(both.from_pool), "from_memory": asdict(both.from_memory)} for both in rounds]
    sys.stdout.write(f"\n{json.dumps({'rounds': told})}\n")


def rounds_told(output: str) -> list[Round]:
    (answer, *_) = [json.loads(line) for line in reversed(output.splitlines()) if line.startswith('{"rounds"')]
    return [_round(both) for both in answer["rounds"]]


def _round(both: dict[str, dict[str, Any]]) -> Round:
    return Round(TimedRun(**both["from_pool"]), TimedRun(**both["from_memory"]))
