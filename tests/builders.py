"""Steps for tests, with as little as the test at hand cares about."""

from typing import Any

from stepwell.core.step import Step, ids_array, logprobs_array


def make_step(trajectory_uid: str = "t", prompt_uid: str = "p", **fields: Any) -> Step:
    response = fields.pop("response_ids", [3, 4])
    fields.setdefault("response_logprobs", logprobs_array([-0.5] * len(response)))
    return Step(
        trajectory_uid=trajectory_uid,
        prompt_uid=prompt_uid,
        prompt_ids=ids_array(fields.pop("prompt_ids", [1, 2])),
        response_ids=ids_array(response),
        **fields,
    )


def same_step(a: Step, b: Step) -> bool:
    """Equal in every field, arrays by value, dtype and length."""

    def comparable(value: object) -> object:
        return (value.dtype, value.tolist()) if hasattr(value, "dtype") and hasattr(value, "tolist") else value

    return all(comparable(getattr(a, name)) == comparable(getattr(b, name)) for name in Step.__dataclass_fields__)
