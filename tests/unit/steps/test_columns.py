from collections.abc import Mapping
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from rig.builders import make_step, same_step
from stepwell.steps.columns import pack, unpack
from stepwell.steps.step import Exactness, JsonObject, Step, VersionSpan, ids_array, logprobs_array

texts = st.text(max_size=8)
objects = st.dictionaries(
    texts, st.none() | st.booleans() | st.integers() | texts | st.lists(st.integers()), max_size=3
)
token_ids = st.integers(0, 2**31 - 1)


def json(drawn: Mapping[str, Any]) -> JsonObject:
    return drawn


@st.composite
def steps(draw: st.DrawFn) -> Step:
    response = draw(st.lists(token_ids, max_size=6))
    mask = draw(st.lists(st.booleans(), min_size=len(response), max_size=len(response)))
    logprobs = draw(st.lists(st.floats(-50, 0, width=32), min_size=len(response), max_size=len(response)))
    has_logprobs = draw(st.booleans())
    return Step(
        prompt_ids=ids_array(draw(st.lists(token_ids, max_size=6))),
        response_ids=ids_array(response),
        response_logprobs=logprobs_array(logprobs) if response and has_logprobs else None,
        response_mask=None if all(mask) else np.array(mask),
        reward=draw(st.none() | st.floats(allow_nan=False)),
        reward_source=draw(texts),
        reward_revision=draw(st.integers(0, 9)),
        trajectory_uid=draw(texts),
        prompt_uid=draw(texts),
        uid=draw(texts),
        step_index=draw(st.integers(-1, 1000)),
        policy_version=draw(st.integers(0, 2**40)),
        is_last=draw(st.booleans()),
        started_at=draw(st.floats(0, 2e9)),
        metadata=json(draw(objects)),
        sampling=json(draw(objects)),
        extras=json(draw(objects)),
        version_spans=tuple(draw(st.lists(st.builds(VersionSpan, *[st.integers(0, 99)] * 3), max_size=2))),
        exactness=draw(st.sampled_from(Exactness)),
        finish_reason=draw(st.none() | texts),
        quarantine=draw(st.none() | texts),
        untrainable=draw(st.none() | texts),
    )


@given(st.lists(steps(), max_size=5), st.booleans())
def test_steps_survive_packing_in_every_field(given_steps: list[Step], copy: bool) -> None:
    unpacked = unpack(pack(given_steps), copy=copy)
    assert len(unpacked) == len(given_steps)
    assert all(same_step(a, b) for a, b in zip(given_steps, unpacked, strict=True))


def test_a_copied_step_does_not_keep_its_message_alive() -> None:
    columns = pack([make_step(prompt_ids=range(1000)), make_step()])
    _, kept = unpack(columns, copy=True)
    for array in (kept.prompt_ids, kept.response_ids, kept.response_logprobs):
        assert array is not None
        owner = array if array.base is None else array.base
        assert isinstance(owner, np.ndarray)
        assert owner.nbytes <= 4 * kept.tokens


def test_an_uncopied_step_shares_the_messages_memory() -> None:
    columns = pack([make_step(), make_step()])
    assert all(np.shares_memory(step.prompt_ids, columns.tokens) for step in unpack(columns, copy=False))
