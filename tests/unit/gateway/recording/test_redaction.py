import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from stepwell.steps.trainable import step_fault

from rig.builders import make_step
from rig.docs_pages import DOCS, blocks
from rig.vocabulary import ADDED_IDS, END_OF_TURN, encode
from stepwell.common.tokenizers import LoadedTokenizer
from stepwell.gateway.recording.redaction import (
    RedactionFound,
    SpanFinder,
    Spans,
    SpansError,
    mask_id,
    mask_step,
    merged,
    task_of,
    token_spans,
)
from stepwell.steps.prefix_tree import PrefixTree
from stepwell.steps.step import Step

MASK = ord("*")
SECRET = re.compile(r"\bs\w*t\b|ü+")


def secrets(text: str) -> list[tuple[int, int]]:
    return [found.span() for found in SECRET.finditer(text)]


@pytest.fixture
def finder(tiny_model: Path) -> SpanFinder:
    return SpanFinder(secrets, LoadedTokenizer.load(str(tiny_model)))


def redacted(finder: SpanFinder, step: Step) -> Step:
    return mask_step(step, finder.find(task_of(step)), MASK)


def spoken(prompt: str, response: str, **fields: Any) -> Step:
    return make_step(prompt_ids=encode(prompt), response_ids=[*encode(response), END_OF_TURN], **fields)


@pytest.mark.parametrize(
    ("texts", "spans", "found"),
    [
        (["ab", "cd", "ef"], [(2, 4)], [(1, 2)]),
        (["ab", "cd", "ef"], [(1, 3)], [(0, 2)]),
        (["ab", "cd", "ef"], [(1, 2), (5, 6)], [(0, 1), (2, 3)]),
        (["ab", "cd", "ef"], [(2, 2)], []),
        (["a", "", "ü", "b"], [(1, 2)], [(1, 3)]),
        (["a", "", "", "", "😀", "b"], [(2, 3)], [(5, 6)]),
        (["a", "", "bü", "c"], [(1, 2)], [(1, 3)]),
        (["a", ""], [(0, 1)], [(0, 1)]),
        ([], [], []),
    ],
)
def test_every_token_that_has_a_part_of_a_span_is_masked(texts: Sequence[str], spans: Spans, found: Spans) -> None:
    assert list(token_spans(texts, spans)) == list(found)


def test_spans_that_overlap_or_touch_become_one() -> None:
    assert merged([(5, 7), (0, 2), (1, 3), (3, 4), (6, 6)]) == [(0, 4), (5, 7)]


def test_all_bytes_of_a_character_are_masked(finder: SpanFinder) -> None:
    step = redacted(finder, spoken("aüb", "c"))
    assert step.prompt_ids.tolist() == [ord("a"), MASK, MASK, ord("b")]
    assert step.extras["redacted"] == {"mask_id": MASK, "tokens": [[1, 3]]}


def test_a_masked_response_token_is_neutral_and_not_trained(finder: SpanFinder) -> None:
    step = redacted(finder, spoken("hi", "a st"))
    assert step.response_ids.tolist() == [*encode("a "), MASK, MASK, END_OF_TURN]
    assert step.response_logprobs is not None
    assert step.response_logprobs.tolist() == [-0.5, -0.5, 0.0, 0.0, -0.5]
    assert step.response_mask is not None
    assert step.response_mask.tolist() == [True, True, False, False, True]
    assert step.untrainable == "redacted: --redact masks 2 of its tokens"
    assert step_fault(step) is None


def test_a_span_over_the_end_of_the_prompt_is_masked_on_both_sides(finder: SpanFinder) -> None:
    step = redacted(finder, spoken("a se", "cret"))
    assert step.prompt_ids.tolist() == [*encode("a "), MASK, MASK]
    assert step.response_ids.tolist() == [MASK] * 4 + [END_OF_TURN]


def test_an_earlier_mask_and_reason_stay(finder: SpanFinder) -> None:
    trained = np.array([False, True, True, True, True])
    step = redacted(finder, spoken("hi", "a st", response_mask=trained, untrainable="greedy: temperature is 0"))
    assert step.response_mask is not None
    assert step.response_mask.tolist() == [False, True, False, False, True]
    assert step.untrainable == "greedy: temperature is 0"
    assert trained.all() == np.False_


def test_what_has_no_span_stays_as_it_is(finder: SpanFinder) -> None:
    step = spoken("hello", "there", extras={"a": ["b", 1, None]}, lineage={"replied": "x"})
    assert redacted(finder, step) is step


def test_texts_and_keys_beside_the_tokens_are_masked_and_digests_go(finder: SpanFinder) -> None:
    step = spoken(
        "hi",
        "a",
        extras={"turn": [{"content": "my secret here", "n": 3}], "secret": True},
        metadata={"note": "set ü"},
        sampling={"stop": ["spot"]},
        lineage={"replied": "x"},
    )
    masked = redacted(finder, step)
    assert masked.extras == {"turn": [{"content": "my *** here", "n": 3}], "***": True}
    assert (masked.metadata, masked.sampling, masked.lineage) == ({"note": "*** ***"}, {"stop": ["***"]}, {})
    assert masked.untrainable is None
    assert step.metadata == {"note": "set ü"}


def test_special_tokens_divide_texts_and_are_never_masked(finder: SpanFinder) -> None:
    ids = [*encode("s"), ADDED_IDS["<|im_end|>"], *encode("t")]
    assert redacted(finder, make_step(prompt_ids=ids)).prompt_ids.tolist() == ids


def test_the_tokens_of_a_turn_stay_a_prefix_of_the_next_turns(finder: SpanFinder) -> None:
    """A message is judged alone: what follows the end of a turn cannot complete or undo a span in it."""
    first = spoken("<|im_start|>user\na set<|im_end|>\n<|im_start|>assistant\n", "all is s")
    tail = encode("\n<|im_start|>user\ntell ü\n<|im_end|>\n<|im_start|>assistant\n")
    second = make_step(prompt_ids=[*first.prompt_ids, *first.response_ids, *tail], response_ids=encode("sent"))
    tree = PrefixTree()
    for step in (redacted(finder, first), redacted(finder, second)):
        tree.place(np.concatenate([step.prompt_ids, step.response_ids]))
    assert tree.forks == 0


def test_a_text_that_goes_on_without_a_special_token_is_judged_anew_and_forks(finder: SpanFinder) -> None:
    """As in completions without a chat template: both are stored whole, and the later one is masked."""
    first = make_step(prompt_ids=encode("a"), response_ids=encode(" se"))
    second = make_step(prompt_ids=encode("a se"), response_ids=encode("t"))
    tree = PrefixTree()
    stored = [redacted(finder, step) for step in (first, second)]
    placed = [tree.place(np.concatenate([step.prompt_ids, step.response_ids])) for step in stored]
    assert tree.read(placed[0].branch, 4).tolist() == encode("a se")
    assert tree.read(placed[1].branch, 5).tolist() == [*encode("a "), MASK, MASK, MASK]


def test_a_message_that_every_turn_repeats_is_judged_once(tiny_model: Path) -> None:
    judged: list[str] = []

    def find(text: str) -> list[tuple[int, int]]:
        judged.append(text)
        return secrets(text)

    finder = SpanFinder(find, LoadedTokenizer.load(str(tiny_model)))
    for turn in ("a set<|im_end|>", "a set<|im_end|>b<|im_end|>"):
        assert list(finder.find(task_of(make_step(prompt_ids=encode(turn), response_ids=[]))).tokens) == [(2, 5)]
    assert judged == ["a set", "b"]


@pytest.mark.parametrize("spans", [[(0, 99)], [(2, 1)], [(-1, 1)], ["ab"], [(0.0, 1.0)], [None], 3])
def test_what_is_no_span_of_the_text_is_a_failure(tiny_model: Path, spans: object) -> None:
    finder = SpanFinder(lambda _: spans, LoadedTokenizer.load(str(tiny_model)))  # type: ignore[arg-type, return-value]
    with pytest.raises((SpansError, TypeError)):
        finder.find(task_of(spoken("hi", "a")))


def test_the_mask_is_a_token_of_text_or_else_the_lowest_special_one(tiny_model: Path) -> None:
    assert mask_id(LoadedTokenizer.load(str(tiny_model))) == MASK
    few = LoadedTokenizer(lambda _: "", frozenset({7, 5}), {"x": 3}.get)
    none = LoadedTokenizer(lambda _: "", frozenset({7, 5}), lambda _: None)
    assert (mask_id(few), mask_id(none)) == (3, 5)


def test_nothing_is_found_in_a_step_without_tokens(finder: SpanFinder) -> None:
    assert finder.find(task_of(make_step(prompt_ids=[], response_ids=[]))) == RedactionFound([], [])


def test_the_function_of_the_docs_finds_its_secrets() -> None:
    (block,) = blocks(DOCS / "privacy.md", "python")
    names: dict[str, Any] = {}
    exec(block.code, names)
    assert names["find_secrets"]("my number is KD-123456, not KD-1") == [(13, 22)]
