"""The reference trainer while agents sample from the engine that it syncs: what it really waits.

The machine is shared by vLLM, the gateway, the pool and the trainer, so this depends on how long sampling takes more
than on anything else. `benchmarks.learning` compares it with a loop that has no pool and no gateway.
"""

import time
from dataclasses import dataclass

from benchmarks.learning_rig.rig import Rig, settings
from stepwell.demo.agent_process import GROUP

GROUPS = 16
STANDING = 1e-6
"""A learning rate at which the model stays what it is."""
UPDATES_PLANNED = 10_000


@dataclass(frozen=True, slots=True)
class LiveLength:
    unmeasured: int
    updates: int


def measure_live(rig: Rig, length: LiveLength) -> dict[str, float]:
    """Samples per second, and the shares of the time in which it waited for a batch and in which it synced."""
    with rig.run("live", settings(UPDATES_PLANNED, GROUPS, rate=STANDING), ahead=1) as run:
        run.agents.train()
        for _ in range(length.unmeasured):
            run.trainer.step()
        began = time.monotonic()
        updates = [run.trainer.step() for _ in range(length.updates)]
        seconds = time.monotonic() - began
        run.agents.stop()
    return {
        "ours_live_samples_s": length.updates * GROUPS * GROUP / seconds,
        "ours_live_waiting": sum(update.fetch_seconds for update in updates) / seconds,
        "ours_live_syncing": sum(update.sync_seconds for update in updates) / seconds,
    }
