"""Rewards of 1 or 0 for text: equal, equal after normalisation, the same number, matched by a pattern, in a form."""

import math
import re
import string
import unicodedata
from collections.abc import Callable

from stepwell.errors import BadRequest, RewardFailed
from stepwell.pool.api.scoring import Score
from stepwell.rewards.sample import Sample

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
    numerator, denominator = (_digits(part) for part in numbers[-1])
    return numerator / denominator if denominator else None


def _digits(written: str) -> float:
    return float(written.replace(",", "").replace("−", "-") or 1)


def _expected_number(sample: Sample, text: str) -> float:
    number = last_number(text)
    if number is None:
        raise RewardFailed(f"trajectory {sample.trajectory_uid!r} expects {text!r}, which holds no number")
    return number
