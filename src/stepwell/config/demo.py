"""The settings of `stepwell demo`."""

from pathlib import Path
from typing import Literal

from pydantic import Field
from pydantic_settings import SettingsConfigDict

from stepwell.config.sections import Section


class DemoSettings(Section):
    """A tiny model, made on the spot, learns from what its agent does, served by a real vLLM on a bare CPU.

    It takes some four minutes on two cores, and leaves its numbers, its picture and its logs in a folder.
    """

    model_config = SettingsConfigDict(env_prefix="STEPWELL_DEMO_")

    task: Literal["rev", "tool"] = "rev"
    """What is learned: rev, to say a word backwards; tool, to use a calculator and say its result."""
    seed: int = 0
    """Decides the model, the held-out samples and the order of the others."""
    updates: int | None = Field(default=None, ge=1)
    """Batches to train on; without it, as many as the task takes."""
    out: Path = Path("stepwell-demo")
    """Folder for what comes of it; what an earlier run left there is written over."""
    plot: bool = True
    """Draw the reward as it rises, and leave a picture of it."""
    vllm_python: str | None = None
    """Python of the environment that vLLM is in; without it, this one or the one in the cache is taken."""
