"""Rewards for text: equal, equal after normalisation, the same number, a pattern, a form, JSON that fits a schema.

They read a sample's answer; most compare it with the expected answer.

- A missing expected answer is a fault of the data and raises RewardFailed.
- A missing answer is the policy's fault and is the empty string.
"""

import math
import re
import string
import unicodedata
from collections.abc import Callable, Mapping
from typing import Any

import orjson
from pydantic import JsonValue

from stepwell.common.imports import install_command
from stepwell.errors import BadRequest, NotReady, RewardFailed
from stepwell.pool.api.scoring import Score
from stepwell.rewards.sample import Sample

ANSWER = "answer"
"""The default key of the expected answer in a trajectory's metadata."""

REASONING_BEGINS, REASONING_ENDS = "<think>", "</think>"
FENCE = re.compile(r"^[ \t]*(```+|~~~+)[ \t]*([^\s`]*)[^\n]*$", re.MULTILINE)


def compiled(pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern, re.DOTALL)
    except re.error as failure:
        raise BadRequest(f"{pattern!r} is no regular expression: {failure}") from None


def without_reasoning(text: str) -> str:
    """The text after the reasoning; empty if the reasoning never ended."""
    _, ended, after = text.rpartition(REASONING_ENDS)
    if ended:
        return after.strip()
    return "" if REASONING_BEGINS in text else text.strip()


def answer_of(sample: Sample, extract: re.Pattern[str] | None = None) -> str:
    """The last message without its reasoning; with `extract`, the first group of that pattern's last match."""
    text = without_reasoning(_last_message(sample))
    if extract is None:
        return text
    extracted = ""
    for match in extract.finditer(text):
        extracted = match.group(1 if extract.groups else 0) or ""
    return extracted.strip()


def last_block(text: str) -> str | None:
    """The content of the last closed fenced block of Markdown; None if there is none."""
    last: str | None = None
    opening: re.Match[str] | None = None
    for fence in FENCE.finditer(text):
        if opening is None:
            opening = fence
        elif fence.group(1).startswith(opening.group(1)) and not fence.group(2):
            last, opening = text[opening.end() + 1 : fence.start()], None
    return last


def expected_of(sample: Sample, key: str) -> object:
    """metadata[key], or metadata["reward_model"]["ground_truth"]."""
    if key in sample.metadata:
        return sample.metadata[key]
    reward_model = sample.metadata.get("reward_model")
    if isinstance(reward_model, dict) and "ground_truth" in reward_model:
        return reward_model["ground_truth"]
    raise RewardFailed(
        f"trajectory {sample.trajectory_uid!r} has neither {key!r} nor reward_model.ground_truth in its metadata"
    )


def expected_texts(sample: Sample, key: str) -> list[str]:
    """Every correct answer: a list in the metadata means any of its members."""
    expected = expected_of(sample, key)
    texts = [_as_text(sample, each) for each in (expected if isinstance(expected, list) else [expected])]
    if not texts or not all(map(str.strip, texts)):
        raise RewardFailed(
            f"trajectory {sample.trajectory_uid!r} has an empty list of expected answers, or an empty answer"
        )
    return texts


def _last_message(sample: Sample) -> str:
    """Some templates put the beginning of the reasoning into the prompt. Then only prompt and response together show
    that the reasoning never ended."""
    response = sample.response_text
    return response if REASONING_ENDS in response else sample.messages[-1]["content"]


def _as_text(sample: Sample, value: object) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, int | float) and not isinstance(value, bool):
        return f"{value}"
    raise RewardFailed(
        f"trajectory {sample.trajectory_uid!r} expects {value!r}, which is no text, no number and no list of them"
    )


# -- the rewards -------------------------------------------------------------------------------------------------------

ARTICLES = re.compile(r"\b(?:a|an|the)\b")
WHOLE = r"(?:\d{1,3}(?:,\d{3}){1,12}(?![\d,])|\d+)"
"""The number of groups is bounded, so that the search takes time in proportion to the text."""
NUMBER = re.compile(rf"(?<![\w.])([-+−]?(?:{WHOLE}(?:\.\d+)?|\.\d+)(?:[eE][-+]?\d+)?)(?:\s*/\s*({WHOLE}))?")
PUNCTUATION = str.maketrans("", "", string.punctuation)

Matching = Callable[[Sample], float]


def exact_match(*, answer_key: str = ANSWER, extract: str | None = None) -> Matching:
    """1 if the answer equals the expected one; blanks around either are ignored."""
    return _equal_after(str.strip, answer_key, extract)


def normalised_match(*, answer_key: str = ANSWER, extract: str | None = None) -> Matching:
    """Matches as exact_match does, but ignores case, punctuation, English articles, the width of letters, and
    blanks."""
    return _equal_after(normalised, answer_key, extract)


def number_match(*, answer_key: str = ANSWER, extract: str | None = None, tolerance: float = 1e-6) -> Matching:
    """1 if the last number of the answer is the expected one, within a relative tolerance."""
    pattern = compiled(extract) if extract else None

    def score(sample: Sample) -> float:
        answer = last_number(answer_of(sample, pattern))
        expected = [_expected_number(sample, text) for text in expected_texts(sample, answer_key)]
        return float(
            answer is not None and any(math.isclose(answer, e, rel_tol=tolerance, abs_tol=1e-12) for e in expected)
        )

    return score


def regex_match(*, pattern: str | None = None, answer_key: str = ANSWER) -> Matching:
    """1 if the pattern matches in the answer. Without a pattern, the expected answer is the pattern."""
    if pattern == "":
        raise BadRequest("pattern: the empty pattern matches every answer")
    fixed = compiled(pattern) if pattern is not None else None

    def score(sample: Sample) -> float:
        patterns = [fixed] if fixed else [compiled(text) for text in expected_texts(sample, answer_key)]
        answer = answer_of(sample)
        return float(any(each.search(answer) for each in patterns))

    return score


def format_match(*, tags: tuple[str, ...] = ("think", "answer")) -> Callable[[Sample], Score]:
    """1 if the whole response is <tag>…</tag> for each tag, once, in that order, and nothing else."""
    in_order = re.compile(r"\s*".join(f"<{tag}>.*</{tag}>" for tag in map(re.escape, tags)), re.DOTALL)

    def score(sample: Sample) -> Score:
        text = sample.response_text
        once = {tag: text.count(f"<{tag}>") == text.count(f"</{tag}>") == 1 for tag in tags}
        right = all(once.values()) and in_order.fullmatch(text.strip())
        return Score(float(bool(right)), parts={tag: float(there) for tag, there in once.items()})

    return score


def _equal_after(change: Callable[[str], str], answer_key: str, extract: str | None) -> Matching:
    pattern = compiled(extract) if extract else None

    def score(sample: Sample) -> float:
        return float(change(answer_of(sample, pattern)) in map(change, expected_texts(sample, answer_key)))

    return score


def normalised(text: str) -> str:
    """A rule that would leave nothing of the text is not applied: the answer A of a multiple choice is no article."""
    folded = unicodedata.normalize("NFKC", text).casefold()
    words = folded.translate(PUNCTUATION)
    forms = (ARTICLES.sub(" ", words), words, folded)
    return next((" ".join(form.split()) for form in forms if form.strip()), "")


def last_number(text: str) -> float | None:
    """The last number written in digits: 1,234.5 and 6e-3 and 3/4 are numbers, the 2 of H2O is none."""
    numbers = NUMBER.findall(text)
    if not numbers:
        return None
    numerator, denominator = (float(part.replace(",", "").replace("−", "-") or 1) for part in numbers[-1])
    return numerator / denominator if denominator else None


def _expected_number(sample: Sample, text: str) -> float:
    number = last_number(text)
    if number is None:
        raise RewardFailed(f"trajectory {sample.trajectory_uid!r} expects {text!r}, which holds no number")
    return number


def json_schema(
    *, schema: Mapping[str, JsonValue] | None = None, schema_key: str = "schema", extract: str | None = None
) -> Callable[[Sample], Score]:
    """1 if the answer, or its last fenced block, is JSON that conforms to the schema; the notes name a violation.

    Without a schema, each trajectory's metadata holds one. References to other documents are never fetched.
    """
    pattern = compiled(extract) if extract else None
    fixed = _validator(schema, BadRequest) if schema is not None else None

    def score(sample: Sample) -> Score:
        validator = fixed or _validator(expected_of(sample, schema_key), RewardFailed)
        answer = answer_of(sample, pattern)
        try:
            value = orjson.loads(last_block(answer) or answer)
        except orjson.JSONDecodeError as failure:
            return Score(0.0, notes=f"no JSON: {failure}")
        try:
            error = next(validator.iter_errors(value), None)
        except RecursionError:
            return Score(0.0, notes="nested too deeply")
        return Score(1.0) if error is None else Score(0.0, notes=f"{error.json_path}: {error.message}"[:500])

    return score


def _validator(schema: object, failure: type[BadRequest | RewardFailed]) -> Any:
    if not isinstance(schema, Mapping):
        raise failure(f"the schema is a {type(schema).__name__}, not an object")
    try:
        from jsonschema import Draft202012Validator, SchemaError
        from jsonschema.validators import validator_for
        from jsonschema_specifications import REGISTRY
    except ImportError:
        raise NotReady(f"json_schema needs jsonschema: {install_command('rewards')}") from None
    kind = validator_for(schema, default=Draft202012Validator)
    try:
        kind.check_schema(schema)
    except SchemaError as error:
        raise failure(f"the schema is invalid: {error.json_path}: {error.message}") from None
    return kind(schema, registry=REGISTRY)
