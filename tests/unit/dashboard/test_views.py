import numpy as np
import pytest

from rig.builders import make_step
from rig.made_up_rollouts import RigTokenizer, steps_of
from rig.vocabulary import encode
from stepwell.common.tokenizers import TokenDecoder
from stepwell.dashboard.views import PROMPT_TOKENS, group_view, last_text, step_views
from stepwell.pool.api.watching import TrajectoryState
from stepwell.steps.step import VersionSpan
from tests.unit.dashboard.summaries import make_summary

READER = TokenDecoder(RigTokenizer())


def test_a_step_shows_only_what_is_new_in_its_prompt() -> None:
    steps = steps_of(2)
    first, second, third = step_views(steps, READER)
    assert first["new_from"] == 0
    assert [turn.role for turn in first["turns"]] == ["system", "user", "assistant"]
    assert second["new_from"] == len(steps[0].prompt_ids) + len(steps[0].response_ids)
    assert [turn.role for turn in second["turns"]] == ["tool", "assistant"]
    assert third["turns"][-1].is_response
    assert "".join(second["prompt_tokens"].texts) == READER.text(steps[1].prompt_ids[second["new_from"] :].tolist())


def test_tokens_carry_log_probability_mask_and_version() -> None:
    step = make_step(
        response_ids=encode("abcd"),
        response_logprobs=np.array([-0.5, -1, np.nan, -2], np.float32),
        response_mask=np.array([True, False, True, True]),
        policy_version=3,
        version_spans=(VersionSpan(3, 0, 2), VersionSpan(4, 2, 4)),
    )
    tokens = step_views([step], READER)[0]["tokens"]
    assert tokens.texts == ["a", "b", "c", "d"]
    assert tokens.logprobs == [-0.5, -1.0, None, -2.0]
    assert tokens.trained == [True, False, True, True]
    assert tokens.versions == [3, 3, 4, 4]


def test_what_is_unknown_of_tokens_is_said_to_be() -> None:
    step = make_step(response_ids=encode("ab"), response_logprobs=None, policy_version=3)
    tokens = step_views([step], READER)[0]["tokens"]
    assert (tokens.logprobs, tokens.trained, tokens.versions) == ([None, None], [True, True], [3, 3])


def test_a_long_prompt_is_cut_where_it_begins() -> None:
    shown = step_views([make_step(prompt_ids=[97] * PROMPT_TOKENS + [98])], READER)[0]["prompt_tokens"]
    assert (len(shown.ids), shown.ids[-1], shown.texts[-1], shown.cut) == (PROMPT_TOKENS, 98, "b", 1)


def test_without_a_tokenizer_there_are_ids_only() -> None:
    view = step_views([make_step(response_ids=[3, 4])], TokenDecoder(None))[0]
    assert (view["turns"], view["tokens"].texts, view["tokens"].ids) == ((), [], [3, 4])


def test_advantages_are_over_the_group_without_what_was_dropped() -> None:
    rows = [
        make_summary("a", reward=1.0),
        make_summary("b", reward=0.0),
        make_summary("c", reward=None),
        make_summary("d", reward=9.0, state=TrajectoryState.DROPPED, cause="rejected"),
    ]
    view = group_view(rows, {("a", "p"): "The end."})
    assert (view.mean, view.size) == (0.5, 2)
    assert view.std == pytest.approx(0.5**0.5)
    expected = pytest.approx(0.5 / (0.5**0.5 + 1e-4)), pytest.approx(-0.5 / (0.5**0.5 + 1e-4))
    assert [row.advantage for row in view.rows] == [*expected, None, None]
    assert [row.last for row in view.rows] == ["The end.", "", "", ""]


def test_a_group_without_rewards_has_no_advantages() -> None:
    view = group_view([make_summary("a")], {})
    assert (view.mean, view.std, view.rows[0].advantage) == (None, None, None)


def test_the_last_text_is_the_end_of_the_last_response() -> None:
    steps = [make_step(response_ids=encode("a")), make_step(response_ids=encode("b" * 3_000))]
    assert last_text(steps, READER) == "b" * 2_000
