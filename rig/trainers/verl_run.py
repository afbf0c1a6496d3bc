"""verl's own main_ppo on a CPU, started by examples/verl/train.sh."""

import json
import os
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from rig.trainers.process import CHECKOUT, EXAMPLES, start_command

EXAMPLE = EXAMPLES / "verl" / "train.sh"
RIG = Path(__file__).parent / "verl_on_cpu"
PATHS = os.pathsep.join([str(CHECKOUT / "src"), str(RIG)])
ON_CPU = {
    "VERL_PLATFORM": "cpu",
    "VERL_USE_EXTERNAL_MODULES": "stepwell_verl_cpu",
    "VERL_ENGINE_DEVICE": "cuda",
    "PYTHONPATH": PATHS,
}
RESOURCES = {"num_cpus": 12, "num_gpus": 1}
"""What verl asks of Ray, in a node of its own."""
ALIKE = 1e-4
"""What the log-probabilities of vLLM and verl may differ by after a sync; with more, the run fails."""


@dataclass(frozen=True, slots=True)
class VerlRun:
    process: "subprocess.Popen[str]"
    log: Path
    metrics_file: Path

    def metrics(self) -> list[dict[str, Any]]:
        """Of the steps so far, verl's own and ours."""
        if not self.metrics_file.exists():
            return []
        lines = [line for line in self.metrics_file.read_text().splitlines(keepends=True) if line.endswith("\n")]
        return [{"step": told["step"], **told["data"]} for told in map(json.loads, lines)]

    def kill(self) -> None:
        """SIGKILL to the command; Ray then ends the processes that it started."""
        self.process.kill()
        self.process.wait()

    def wait(self, timeout: float) -> list[dict[str, Any]]:
        """The metrics of its steps, once it has ended well."""
        try:
            self.process.wait(timeout)
        finally:
            self.kill()
        assert self.process.returncode == 0, self.log.read_text()[-8000:]
        return self.metrics()


def start_verl(address: str, overrides: Mapping[str, object], *, model: Path, folder: Path, name: str) -> VerlRun:
    """`address` is that of the pool's Ray; `name` is that of its files in `folder`."""
    log, metrics_file = folder / f"{name}.log", folder / f"{name}.jsonl"
    environment = "ray_kwargs.ray_init.runtime_env.env_vars"
    told = {
        **dict(_flat(yaml.safe_load((RIG / "cpu.yaml").read_text()), "++")),
        f"+{environment}.PYTHONPATH": PATHS,
        f"+{environment}.VERL_FILE_LOGGER_PATH": metrics_file,
        "trainer.logger": "[console,file]",
        "trainer.default_local_dir": folder / "checkpoints",
        "trainer.save_freq": -1,
        "trainer.v1.stepwell.tolerance": ALIKE,
        "data.max_prompt_length": 64,
        "data.max_response_length": 64,
        **overrides,
    }
    command = ["bash", EXAMPLE, model, folder / "weights", *(f"{key}={value}" for key, value in told.items())]
    return VerlRun(start_command("verl", command, address=address, log=log, **ON_CPU), log, metrics_file)


def _flat(tree: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, str]]:
    """Its values as Hydra reads them, by their whole names."""
    for name, value in tree.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", json.dumps(value)
