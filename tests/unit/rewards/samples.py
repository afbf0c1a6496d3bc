from pathlib import Path
from typing import Any

from rig.builders import make_step
from stepwell.rewards.runner.messages import Job
from stepwell.rewards.sample import Sample, sample_of

GRADERS = str(Path(__file__).with_name("graders.py"))


def job(function: str = "graded", **terms: Any) -> Job:
    return Job(function=f"{GRADERS}:{function}", **{"timeout": 20.0, "children": 2, **terms})


def sample(way: str = "fine", **fields: Any) -> Sample:
    """One step; the function is told what to do."""
    return sample_of([make_step(metadata={"way": way, **fields.pop("metadata", {})}, **fields)])
