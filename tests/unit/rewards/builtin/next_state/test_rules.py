"""The table of rules: what it finds in texts that it was not written from, and how options extend it."""

from collections.abc import Iterable

import pytest
from stepwell.rewards.builtin.next_state_rules import (
    LONGEST_EVIDENCE,
    RULES,
    Evidence,
    NextState,
    Speaker,
    Utterance,
    extended,
    first_evidence,
)

from stepwell.errors import BadRequest
from tests.unit.rewards.builtin.next_state.held_out import REQUEST, TOOLS, USERS

LABELLED: list[tuple[str, str | None, Speaker]] = [
    *((text, rule, "user") for text, rule in USERS),
    *((text, rule, "tool") for text, rule in TOOLS),
]


def said(*texts: str, speaker: Speaker = "user", request: str = REQUEST) -> NextState:
    return NextState(request, "a reply", tuple(Utterance(speaker, text) for text in texts))


def found(text: str, speaker: Speaker = "user", request: str = REQUEST) -> Evidence | None:
    return first_evidence(RULES, said(text, speaker=speaker, request=request))


def rule_of(text: str, speaker: Speaker = "user") -> str | None:
    evidence = found(text, speaker)
    return None if evidence is None else evidence.rule


def sign(rule: str | None) -> int:
    rewards = {each.name: each.reward for each in RULES}
    return 0 if rule is None else 1 if rewards[rule] > 0 else -1


def rates(pairs: Iterable[tuple[int, int]]) -> tuple[float, float]:
    """Precision and recall of (given, wanted) signs."""
    pairs = list(pairs)
    right = sum(given == wanted != 0 for given, wanted in pairs)
    return right / sum(given != 0 for given, _ in pairs), right / sum(wanted != 0 for _, wanted in pairs)


def test_the_sign_of_a_reward_is_right_on_texts_that_no_rule_was_written_from() -> None:
    precision, recall = rates((sign(rule_of(text, who)), sign(rule)) for text, rule, who in LABELLED)
    wrong = [(text, rule_of(text, who), rule) for text, rule, who in LABELLED if rule_of(text, who) != rule]
    assert precision >= 0.95, wrong
    assert recall >= 0.85, wrong


@pytest.mark.parametrize("rule", [rule.name for rule in RULES])
def test_each_rule_finds_most_of_what_it_is_for(rule: str) -> None:
    own = [rule_of(text, who) == rule for text, label, who in LABELLED if label == rule]
    assert sum(own) / len(own) >= 0.75, own


def test_the_first_rule_that_fits_counts_and_the_user_counts_before_a_tool() -> None:
    state = NextState(REQUEST, "", (Utterance("tool", "exit code 1"), Utterance("user", "Thanks, that's it!")))
    evidence = first_evidence(RULES, state)
    assert evidence is not None
    assert (evidence.rule, evidence.speaker) == ("thanks", "user")


def test_the_evidence_is_shortened_around_what_fits() -> None:
    evidence = found("Let me see. " * 10 + "That's wrong, it must be blue. " + "More of it. " * 10)
    assert evidence is not None
    assert "That's wrong" in evidence.text
    assert len(evidence.text) <= LONGEST_EVIDENCE + 2
    assert evidence.details() == {"rule": "correction", "speaker": "user", "text": evidence.text, "hint": evidence.hint}


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("No, I meant the blue one. Hurry up!", "the blue one"),
        ("That's wrong. Use the metric system instead.", "Use the metric system instead"),
        ("It should be sorted by date.", "sorted by date"),
        ("Wrong, Paris.", "Paris"),
        ("No.", ""),
        ("不对，我要的是降序", "降序"),
    ],
)
def test_a_correction_says_what_was_wanted_instead(text: str, hint: str) -> None:
    evidence = found(text)
    assert evidence is not None
    assert evidence.hint == hint


def test_pasted_code_and_the_middle_of_a_long_text_say_nothing() -> None:
    assert found("Explain this:\n```\nThat's wrong, thanks\n```") is None
    assert (
        found("Read this story. " + "Once upon a time. " * 40 + "That's wrong, she said. " + "And so on. " * 40) is None
    )


def test_a_short_request_again_is_no_repetition() -> None:
    assert found("Go on", request="Go on") is None
    assert rule_of("Go on") is None


def test_options_add_patterns_change_rewards_and_add_rules() -> None:
    rules = extended(RULES, "correction", patterns=("^bzzt",), reward=-0.25)
    rules = extended(rules, "sale", patterns=(r"order #\d+",), reward=1.0, speaker="tool")
    bzzt = first_evidence(rules, said("Bzzt"))
    assert bzzt is not None
    assert (bzzt.rule, bzzt.reward) == ("correction", -0.25)
    sale = first_evidence(rules, said("order #12: exit code 1", speaker="tool"))
    assert sale is not None
    assert sale.rule == "sale"
    assert first_evidence(rules, said("order #12")) is None


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"reward": 2.0, "patterns": ("x",)}, "from -1 to 1"),
        ({"patterns": ("x",)}, "needs a reward"),
        ({"reward": 1.0}, "and patterns"),
    ],
)
def test_a_rule_that_cannot_work_is_refused(options: dict[str, object], why: str) -> None:
    with pytest.raises(BadRequest, match=why):
        extended(RULES, "new", **options)  # type: ignore[arg-type]
