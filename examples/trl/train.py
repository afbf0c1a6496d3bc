"""TRL's AsyncGRPOTrainer on the rollouts in the pool. All flags of AsyncGRPOConfig can be given.

python examples/trl/train.py --model $MODEL --output_dir run --max_steps 100 --save_steps 10
"""

from dataclasses import dataclass
from pathlib import Path

from datasets import Dataset
from trl import TrlParser
from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer

from stepwell.pool.client import connect
from stepwell.trainers.transfers import CheckpointTransfer
from stepwell.trainers.trl import StepwellRolloutWorker, StepwellWeightTransfer
from stepwell.trainers.trl_callback import StepwellCallback, last_checkpoint
from stepwell.trainers.weight_sync import WeightSync


@dataclass
class Policy:
    model: str
    """The folder of the model that vLLM serves."""


policy, config = TrlParser([Policy, AsyncGRPOConfig]).parse_args_and_config()
folder = Path(config.output_dir)
pool = connect("data_pool")
worker = StepwellRolloutWorker(
    pool,
    samples_ahead=config.per_device_train_batch_size * config.gradient_accumulation_steps,
    temperature=config.temperature,
)
transfer = CheckpointTransfer(folder / "weights", like=Path(policy.model))
sync = WeightSync(transfer=transfer, pool=pool, probe=())
trainer = AsyncGRPOTrainer(
    policy.model,
    args=config,
    train_dataset=Dataset.from_dict({"prompt": ["the agents have their own"]}),
    rollout_worker=worker,
    weight_transfer=StepwellWeightTransfer(sync, pool),
    callbacks=[StepwellCallback(worker)],
)
trainer.train(resume_from_checkpoint=last_checkpoint(folder))
trainer.save_model(str(folder / "trained"))
