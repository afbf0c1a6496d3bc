"""Supervised fine-tuning by TRL on what `stepwell export --shape sft` wrote. All flags of SFTConfig can be given.

python examples/export_and_sft/sft.py --model $MODEL --data sft.parquet --output_dir tuned --max_steps 100
"""

from dataclasses import dataclass

from datasets import load_dataset
from trl import SFTConfig, SFTTrainer, TrlParser


@dataclass
class Tuning:
    model: str
    """Name or folder of the model."""
    data: str
    """The exported file."""


tuning, config = TrlParser([Tuning, SFTConfig]).parse_args_and_config()
examples = load_dataset("parquet", data_files=tuning.data, split="train")
trainer = SFTTrainer(
    tuning.model,
    args=config,
    train_dataset=examples.select_columns(["input_ids", "labels"]),  # the sampled ids: no text is encoded again
)
trainer.train()
trainer.save_model()
losses = [logged["loss"] for logged in trainer.state.log_history if "loss" in logged]
print(f"{len(examples)} examples: loss {losses[0]:.2f} at first, {losses[-1]:.2f} at last")
