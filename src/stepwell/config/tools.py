"""The settings of `stepwell demo` and `stepwell doctor`."""

from pathlib import Path
from typing import Literal

from pydantic import Field, field_validator
from pydantic_settings import SettingsConfigDict

from stepwell.config.sections import Section


class DemoSettings(Section):
    """Train a tiny model on the actions of its agent, with a real vLLM, on a CPU.

    It takes about four minutes on two cores (live: six), and writes its numbers, a chart and its logs to a folder.
    """

    model_config = SettingsConfigDict(env_prefix="STEPWELL_DEMO_")

    task: Literal["rev", "tool", "live"] = "rev"
    """What the model learns: rev, to reverse a word; tool, to call a calculator and repeat its result; live, what the
    users of a chat service want, from what they say next, while a guard rolls back a bad update."""
    seed: int = 0
    """Seed of the model's weights, of the held-out samples and of the order of the other samples."""
    updates: int | None = Field(default=None, ge=1)
    """Batches to train on; without it, as many as the task needs."""
    out: Path = Path("stepwell-demo")
    """Folder for the results; files of an earlier run are overwritten."""
    plot: bool = True
    """Draw the reward while it rises, and write a picture of it."""
    vllm_python: str | None = None
    """Python of the environment that has vLLM; without it, this environment or the one in the cache is used."""


class DoctorSettings(Section):
    """Examine an engine, its model and this machine: what works, what fails and why, and whether every token that
    a gateway would record is exact. It changes nothing, and sends about fifty short requests to the engine.

    The exit status is 0 if no fault was found, else 1.
    """

    model_config = SettingsConfigDict(env_prefix="STEPWELL_DOCTOR_")

    engine: str
    """Address of the vLLM server, http://host:port."""
    tokenizer_path: str | None = None
    """Folder or name of the Hugging Face tokenizer, to decode tokens and to compare the chat template with; without it,
    the engine decodes its own tokens."""
    key: str | None = None
    """API key that the engine requires. Prefer STEPWELL_DOCTOR_KEY: other users can read a command line."""
    ray_address: str | None = None
    """Ray's address, host:port; without it, the cluster on this machine is examined, if there is one."""
    harness: str | None = None
    """A harness of this machine to try with the engine, too: claude-code, codex, openclaw, opencode or qwen-code. It
    works on a small task in a folder of its own, with the rights of this process."""
    as_json: bool = Field(default=False, alias="json")
    """Print the findings as JSON."""

    @field_validator("engine")
    @classmethod
    def _is_address(cls, value: str) -> str:
        if not value.startswith(("http://", "https://")):
            raise ValueError(f"{value!r} is not an address; write http://host:port")
        return value.rstrip("/").removesuffix("/v1")
