"""The reward of a function that the model wrote: the share of its tests that pass, and half of that if it is long.

The tests are in the metadata of the trajectory. The model's code runs in a sandbox, never in the reward worker.
"""

from stepwell.rewards import Sample, Score
from stepwell.rewards.builtin.python_tests import python_tests
from stepwell.rewards.confinement.sandbox import SandboxLevel

LONG = 12
"""Lines of an answer."""

run_tests = python_tests(SandboxLevel.STRICT, seconds=2.0)


def score(sample: Sample) -> Score:
    tests = run_tests(sample)
    lines = len(sample.response_text.splitlines())
    weight = 1.0 if lines <= LONG else 0.5
    return Score(tests.value * weight, parts={**tests.parts, "weight": weight}, notes=tests.notes)
