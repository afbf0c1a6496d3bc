import json
from functools import reduce
from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import given

from rig.builders import make_step
from stepwell.errors import BadRequest
from stepwell.steps.columns import pack, stack, to_bytes, unpack
from stepwell.steps.step import Exactness
from stepwell.wire.scored_groups import ScoredGroup, batch_parts, group_from_json, groups_from_json
from stepwell.wire.scored_groups_arrow import groups_from_arrow, groups_of_streams, groups_to_arrow
from stepwell.wire.scored_groups_steps import columns_from_group, columns_from_groups, groups_from_columns
from tests.unit.wire.scored import KEYS, as_float32, expected, scored_groups, written

GROUP: dict[str, Any] = {
    "tokens": [[1, 2, 3], [4, 5]],
    "masks": [[-100, 2, 3], [-100, 5]],
    "scores": [1.0, 0],
    "inference_logprobs": [[1.0, -0.5, -0.25], [1.0, -0.1]],
}
DEEP = reduce(lambda inner, _: [inner], range(300), list[Any]())


def through_the_pool(group: ScoredGroup, policy_version: int = 7) -> ScoredGroup:
    columns = columns_from_group(group, "p", source="env_0", policy_version=policy_version, arrived_at=1.0)
    steps = pack(unpack(columns, copy=True))
    (back,) = groups_from_columns(steps, [len(steps)])
    return back


@given(scored_groups())
def test_every_field_comes_out_of_the_pool_as_it_was_sent(sent: dict[str, Any]) -> None:
    (group,) = groups_from_json(json.dumps(sent).encode(), "group")
    back = through_the_pool(group)
    assert written(back) == expected(sent, policy_version=7)
    assert list(back.exactness) == [Exactness(grade) for grade in sent.get("exactness", ["submitted"] * len(group))]


@given(scored_groups())
def test_every_field_comes_out_of_arrow_as_it_was_sent(sent: dict[str, Any]) -> None:
    group = group_from_json(sent)
    back, again = groups_from_arrow(groups_to_arrow([group, group]))
    assert written(back) == written(again) == expected(sent)
    assert list(back.exactness) == list(group.exactness)
    assert written(through_the_pool(again)) == expected(sent, policy_version=7)


def test_a_batch_is_one_json_object_with_the_keys_of_atropos_and_two_more() -> None:
    group = group_from_json(GROUP)
    batch = orjson.loads(b"".join(batch_parts([group, group])))
    assert list(batch) == ["batch"]
    assert [set(item) for item in batch["batch"]] == [KEYS | {"policy_versions", "temperatures"}] * 2
    assert json.loads(b"".join(batch_parts([]))) == {"batch": []}


def test_float64_log_probabilities_come_out_as_the_nearest_float32() -> None:
    sent = {**GROUP, "inference_logprobs": [[1.0, -1 / 3, -2 / 3], [1.0, -0.1234567890123]]}
    item = written(through_the_pool(group_from_json(sent)))
    assert item["inference_logprobs"] == as_float32(sent["inference_logprobs"])
    assert np.allclose(item["inference_logprobs"][0], sent["inference_logprobs"][0], rtol=2**-24, atol=0)


def test_a_sequence_is_a_step_whose_prompt_ends_before_the_first_trained_token() -> None:
    sent = {
        "tokens": [[1, 2, 3, 4], [5, 6], [7, 8, 9], [10]],
        "masks": [[-100, -100, 3, -100], [5, 6], [-100] * 3, [-100]],
        "scores": [1.5, -1.5, 0.0, 2.0],
        "inference_logprobs": [[1.0, 1.0, -0.5, 1.0], [-0.25, -0.75], [1.0] * 3, [1.0]],
        "policy_versions": [3, None, 4, None],
        "messages": [[{"role": "user", "content": "a"}], [], [], []],
        "group_overrides": {"weight": 2},
        "env_id": 5,
    }
    columns = columns_from_group(group_from_json(sent), "p", source="env_0", policy_version=9, arrived_at=12.5)
    one, two, three, four = unpack(columns, copy=False)
    assert (one.prompt_ids.tolist(), one.response_ids.tolist()) == ([1, 2], [3, 4])
    assert one.response_mask is not None
    assert one.response_mask.tolist() == [True, False]
    assert one.response_logprobs is not None
    assert one.response_logprobs.tolist() == [-0.5, 1.0]
    assert (one.reward, one.reward_source, one.is_last, one.step_index, one.started_at) == (1.5, "env_0", True, 0, 12.5)
    assert (one.trajectory_uid, one.prompt_uid, two.trajectory_uid) == ("p-0", "p", "p-1")
    assert one.extras == {
        "messages": [{"role": "user", "content": "a"}],
        "group": {"group_overrides": {"weight": 2}, "env_id": 5},
    }
    assert [step.policy_version for step in (one, two, three, four)] == [3, 9, 4, 9]
    assert (two.prompt_ids.tolist(), two.response_ids.tolist()) == ([5], [6]), "a prompt has a token"
    assert (three.prompt_ids.tolist(), three.response_ids.tolist()) == ([7, 8], [9]), "so has a response, if it can"
    assert (four.prompt_ids.tolist(), four.response_ids.tolist()) == ([10], [])


def test_what_agents_recorded_becomes_one_sequence_for_each_merged_row() -> None:
    def step(uid: str, index: int, prompt: list[int], response: list[int], **fields: Any) -> Any:
        return make_step(uid, step_index=index, prompt_ids=prompt, response_ids=response, uid=f"{uid}{index}", **fields)

    columns = pack(
        [
            step("a", 0, [1, 2], [3], policy_version=4, exactness=Exactness.ENGINE, temperature=0.7),
            step(
                "a",
                1,
                [1, 2, 3, 9],
                [5, 6],
                policy_version=5,
                reward=2.0,
                exactness=Exactness.RETOKENIZED,
                temperature=0.7,
            ),
            step("b", 0, [1, 2], [7], policy_version=6, response_logprobs=None, temperature=1.3),
        ]
    )
    (group,) = groups_from_columns(columns, [3])
    item = written(group)
    assert item["tokens"] == [[1, 2, 3, 9, 5, 6], [1, 2, 7]]
    assert item["masks"] == [[-100, -100, 3, -100, 5, 6], [-100, -100, 7]]
    assert item["inference_logprobs"] == [[1.0, 1.0, -0.5, 1.0, -0.5, -0.5], []]
    assert item["scores"] == [2.0, None], "no one has scored the second, which is not 0"
    assert item["policy_versions"] == [4, 6]
    assert item["temperatures"] == [0.7, 1.3]
    assert list(group.exactness) == [Exactness.RETOKENIZED, Exactness.SUBMITTED]
    assert {item[key] for key in KEYS - {"tokens", "masks", "scores", "inference_logprobs"}} == {None}
    assert written(groups_from_arrow(groups_to_arrow([group]))[0]) == item


@pytest.mark.parametrize(
    ("temperatures", "shown"), [((0.7, 1.3), [0.7, 1.3]), ((None, 1.0), [None, 1.0]), ((None, None), None)]
)
def test_a_trainer_learns_at_which_temperatures_agents_sampled(
    temperatures: tuple[float | None, ...], shown: list[float | None] | None
) -> None:
    steps = [make_step(f"t{n}", uid=str(n), temperature=temperature) for n, temperature in enumerate(temperatures)]
    (group,) = groups_from_columns(pack(steps), [len(steps)])
    assert written(group)["temperatures"] == shown


def test_a_sequence_with_turns_of_several_temperatures_has_none() -> None:
    turns = [
        make_step("t", uid="0", step_index=0, prompt_ids=[1], response_ids=[2], temperature=0.7),
        make_step("t", uid="1", step_index=1, prompt_ids=[1, 2], response_ids=[3], temperature=1.0),
    ]
    (group,) = groups_from_columns(pack(turns), [2])
    assert written(group)["temperatures"] is None


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"tokens": []}, "tokens: must be a list with a list of numbers"),
        ({"tokens": None}, "tokens: must be a list with a list"),
        ({"tokens": [[1, 2, 3], []]}, r"tokens\[1\]: a sequence has no tokens"),
        ({"tokens": [[1, 2, 3], 4]}, r"tokens\[1\]: must be a list of numbers, not 4"),
        ({"tokens": [[1, 2, 3], [4, 2**31]]}, r"tokens\[1\]: a number is too large"),
        ({"tokens": [[1, 2, 3], [4, -1]]}, "tokens: an id is negative"),
        ({"tokens": [[1, 2, 3], [4, 0.5]]}, r"tokens\[1\]: entry 1 is 0.5, not an integer"),
        ({"tokens": [[1, 2, 3], ["4", 5]]}, r'tokens\[1\]: entry 0 is "4", not an integer'),
        ({"tokens": [[1, 2, None], [4, 5]]}, r"tokens\[0\]: entry 2 is null, not an integer"),
        ({"masks": [[1, 2, 3]]}, "masks: 1 sequences, but tokens has 2"),
        ({"masks": [[1, 2, 3], [4]]}, r"masks\[1\]: 1 entries for 2 tokens"),
        ({"scores": [1.0]}, "scores: must be a list of 2 numbers"),
        ({"scores": [1.0, None]}, r"scores\[1\]: null is not a number"),
        ({"scores": 1.0}, "scores: must be a list of 2"),
        ({"inference_logprobs": [[1.0, -1.0, None], [1.0, 1.0]]}, r"inference_logprobs\[0\]: entry 2 is null"),
        ({"inference_logprobs": [[1.0, -1.0], [1.0, 1.0]]}, r"inference_logprobs\[0\]: 2 entries for 3 tokens"),
        ({"inference_logprobs": [[1.0, -1.0, -1e300], [1.0, 1.0]]}, "inference_logprobs: -inf is not a finite number"),
        (
            {"inference_logprobs": [[1.0, -1.0, -1.0]]},
            "inference_logprobs: must be null, or a list for each of the 2 sequences",
        ),
        ({"policy_versions": [1]}, "policy_versions: must be a list of 2 entries"),
        ({"policy_versions": [1, -1]}, r"policy_versions\[1\]: -1 is not a policy version"),
        ({"exactness": ["engine", "sure"]}, r'exactness\[1\]: "sure" is none of engine, submitted, retokenized'),
        ({"env_id": "one"}, 'env_id: "one" is not an integer'),
        ({"env_id": DEEP}, "env_id: nested too deeply is not an integer"),
        ({"tokens": [[1, 2, DEEP], [4, 5]]}, r"tokens\[0\]: entry 2 is nested too deeply"),
        ({"images": DEEP}, "a further field is nested too deeply"),
        ({"messages": [DEEP, []]}, "a further field is nested too deeply"),
    ],
)
def test_what_cannot_be_trained_is_refused_with_its_place(change: dict[str, Any], why: str) -> None:
    with pytest.raises(BadRequest, match=why):
        groups_from_json(json.dumps({**GROUP, **change}).encode(), "group")


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999"])
@pytest.mark.parametrize("field", ["scores", "inference_logprobs", "advantages"])
def test_what_is_no_finite_number_never_comes_in(number: str, field: str) -> None:
    body = json.dumps({**GROUP, "advantages": [[0.0], [0.0]], field: "HERE"})
    body = body.replace('"HERE"', f"[[1.0, -0.5, {number}], [1.0, -0.1]]" if field != "scores" else f"[1.0, {number}]")
    with pytest.raises(BadRequest, match="not JSON|not a finite number|not a number"):
        groups_from_json(body.encode(), "group")


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"7", b'{"tokens": [[1]]}', b"\xff"])
def test_what_is_no_group_is_refused(body: bytes) -> None:
    with pytest.raises(BadRequest):
        groups_from_json(body, "group")


def test_a_list_is_read_group_by_group() -> None:
    assert [len(group) for group in groups_from_json(json.dumps([GROUP, GROUP]).encode(), "list")] == [2, 2]
    assert groups_from_json(b"[]", "list") == []
    with pytest.raises(BadRequest, match="a list of groups"):
        groups_from_json(json.dumps(GROUP).encode(), "list")


@pytest.mark.parametrize("are_read_together", [False, True])
def test_groups_that_are_packed_together_are_what_each_is_alone(are_read_together: bool) -> None:
    """Groups that were read together are neighbours in memory, and packed without a copy."""
    full = {"tokens": [[1, 2, 3], [4]], "masks": [[-100, 2, 3], [4]], "scores": [1, 0.5], "env_id": 7}
    logprobs = {"inference_logprobs": [[1.0, -0.5, -0.25], [-1.0]], "temperatures": [0.5, None]}
    greedy = {"generation_params": {"temperature": 0}, "policy_versions": [3, None]}
    groups = [group_from_json(sent) for sent in (full, full | logprobs, full | greedy)]
    if are_read_together:
        streams = groups_of_streams([groups_to_arrow([group]) for group in groups])
        groups = [group for read in streams if isinstance(read, list) for group in read]
        assert groups[0].tokens.base is groups[1].tokens.base
    told: dict[str, Any] = {"policy_version": 9, "arrived_at": 1.0}
    parts = [columns_from_group(group, name, source=name, **told) for group, name in zip(groups, "abc", strict=True)]
    uids = [uid for part in parts for uid in part.trajectory_uids]
    packed = columns_from_groups(groups, "abc", uids, sources="abc", **told)
    assert to_bytes(unpack(packed, copy=False)) == to_bytes(unpack(stack(parts), copy=False))
    assert packed.untrainable == [None, None, None, None, *["greedy: temperature is 0"] * 2]
