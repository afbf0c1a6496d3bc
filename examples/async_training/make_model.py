"""A tiny model that has seen right and wrong answers, as a folder for vLLM: the one of `stepwell demo`.

python examples/async_training/make_model.py FOLDER [STEPS]
"""

import sys
from pathlib import Path

import torch

from stepwell.demo.model import make_model, warm_up, write_model
from stepwell.demo.tasks import TASKS, shown

torch.set_num_threads(1)  # so small a model is not faster on several cores
task, steps = TASKS["rev"], int(sys.argv[2]) if len(sys.argv) > 2 else 250
model = make_model(seed=0)
loss = warm_up(model, shown(task, task.samples(), seed=0), steps)
write_model(model, Path(sys.argv[1]))
print(f"{sys.argv[1]}: loss {loss:.2f} after {steps} steps")
