"""Rows of an export's shape, and one-step answers to export."""

from typing import Any

import numpy as np

from rig.builders import make_step
from rig.vocabulary import encode
from stepwell.exports.shapes import ExportShape
from stepwell.steps.groups import StepGroup
from stepwell.steps.step import Step


def decode(ids: list[int]) -> str:
    return bytes(ids).decode()


def rows(shape: ExportShape, *groups: StepGroup) -> list[dict[str, Any]]:
    """As a table has them; lines have the same."""
    found: list[dict[str, Any]] = shape.table(groups).to_pylist()
    plain = [
        {name: value.tolist() if isinstance(value, np.ndarray) else value for name, value in record.items()}
        for record in shape.records(groups)
    ]
    assert plain == found
    return found


def answer(uid: str, reward: float | None, text: str = "4", prompt: str = "2+2=", **fields: Any) -> list[Step]:
    ids = {"prompt_ids": encode(prompt), "response_ids": encode(text)}
    return [make_step(uid, "p", step_index=0, reward=reward, **{**ids, **fields})]
