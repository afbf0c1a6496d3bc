"""The log-probabilities that transformers computes, to hold vLLM's against.

They are computed in vLLM's environment, which has torch; Stepwell's has none.
"""

import json
import subprocess
import sys
from pathlib import Path

from rig.vllm_server import vllm_python


def reference_logprobs(model: Path, prompt_ids: list[int], reply_ids: list[int]) -> list[float]:
    """One log-probability for each token of the reply, in float32 and at temperature 1."""
    question = json.dumps({"model": str(model), "prompt_ids": prompt_ids, "reply_ids": reply_ids})
    command = [vllm_python(), Path(__file__).with_name("reference_program.py")]
    done = subprocess.run(command, input=question, capture_output=True, text=True)
    if done.returncode:
        sys.stderr.write(done.stderr)
    done.check_returncode()
    logprobs: list[float] = json.loads(done.stdout.splitlines()[-1])
    return logprobs
