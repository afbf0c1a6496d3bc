"""examples/trl/train.py, unchanged, with the flags that are given here, on a CPU. Run in TRL's environment."""

import json
import runpy
import sys
from dataclasses import fields

from stepwell.trainers.trl_groups import RolloutSample
from trl.experimental.async_grpo import async_grpo_trainer  # type: ignore[import-not-found]
from trl.experimental.async_grpo import async_rollout_worker as theirs

from rig.trainers.process import EXAMPLES
from rig.trainers.trl_on_cpu import prepare
from stepwell.trainers.trl import StepwellRolloutWorker, StepwellWeightTransfer


def main() -> None:
    prepare()
    trainer = runpy.run_path(str(EXAMPLES / "trl" / "train.py"), run_name="__main__")["trainer"]
    told = [logged for logged in trainer.state.log_history if "reward" in logged and "kl" in logged]
    answer = {
        "updates": trainer.state.global_step,
        "rewards": [logged["reward"] for logged in told],
        "kls": [logged["kl"] for logged in told],
        "staleness": max(logged["sample/staleness_max"] for logged in told),
        "missing": missing(),
    }
    sys.stdout.write(f"{json.dumps(answer)}\n")


def missing() -> list[str]:
    """What TRL asks for and we do not have."""
    asked = {
        StepwellRolloutWorker: async_grpo_trainer.RolloutWorkerProtocol,
        StepwellWeightTransfer: async_grpo_trainer.WeightTransferProtocol,
    }
    calls = {name for ours, protocol in asked.items() for name in vars(protocol).keys() - vars(ours).keys()}
    attributes = {field.name for field in fields(theirs.RolloutSample)} - set(dir(RolloutSample))
    return sorted(name for name in calls | attributes if not name.startswith("_"))


if __name__ == "__main__":
    main()
