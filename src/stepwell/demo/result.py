"""The result of a run of the demo, as numbers and as a sentence."""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from stepwell.trainers.reporting import UpdateMetrics


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoResult:
    task: str
    seed: int
    updates: int
    start: float
    """Mean reward on held-out samples, before training."""
    end: float
    """Mean reward on held-out samples, after training."""
    samples_per_second: float
    """Trained rollouts per second, from the first to the last update."""
    seconds: float
    """Duration of the whole run, with the start of vLLM and the warm-up."""
    largest_gap: float
    """Largest difference between the engine's log-probabilities and the trainer's, over all syncs."""

    def text(self) -> str:
        return (
            f"reward on held-out samples: {self.start:.3f} before, {self.end:.3f} after {self.updates} updates; "
            f"{self.samples_per_second:.0f} rollouts a second; "
            f"vLLM's log-probabilities are within {self.largest_gap:.0e} of the trainer's"
        )

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self), indent=2) + "\n")


def largest_gap(updates: Sequence[UpdateMetrics]) -> float:
    return max((metrics.logprob_gap for metrics in updates if not math.isnan(metrics.logprob_gap)), default=math.nan)
