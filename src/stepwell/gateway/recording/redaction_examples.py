"""Functions for `--redact`: mail addresses, phone numbers, keys, and all of them.

    stepwell gateway --redact stepwell.gateway.recording.redaction_examples:everything

A function takes a text and returns the spans (start, end) to mask. These patterns are examples: read them, copy them,
and add what your users write. Each takes time in proportion to the text: a match begins only where a word begins, and
no repetition can match the same characters in two ways.
"""

import re
from collections.abc import Sequence
from typing import TypeAlias

Spans: TypeAlias = list[tuple[int, int]]

MAIL = re.compile(r"(?<![\w.+%-])[\w.+%-]{1,64}@[A-Za-z0-9-]{1,63}(?:\.[A-Za-z0-9-]{1,63}){1,8}")
PHONE = re.compile(r"(?<![\w+])(?:\+|00|0|\()[0-9](?:[ ()./-]{0,2}[0-9]){7,14}(?!\w)")
"""A phone number with a country code, a leading zero or a bracket, and at least nine digits, which may be grouped;
dates have less."""
KEYS = (
    re.compile(r"(?<![\w-])(?:sk|pk|rk|xox[abprs]|gh[pousr]|glpat|hf|npm)[-_][A-Za-z0-9_-]{16,}"),
    re.compile(r"\bAKIA[A-Z0-9]{16}\b"),
    re.compile(r"(?<![\w-])eyJ[A-Za-z0-9_-]{10,}\.[A-Za-z0-9_-]{10,}\.[A-Za-z0-9_-]{10,}"),
    re.compile(r"-----BEGIN [A-Z ]{0,30}PRIVATE KEY-----[^-]*(?:-----END [A-Z ]{0,30}PRIVATE KEY-----)?"),
)
"""Keys of OpenAI, Anthropic, Stripe, Slack, GitHub, GitLab, Hugging Face, npm, AWS; JSON web tokens; private keys."""


def mail_addresses(text: str) -> Spans:
    return _find((MAIL,), text)


def phone_numbers(text: str) -> Spans:
    return _find((PHONE,), text)


def keys(text: str) -> Spans:
    return _find(KEYS, text)


def everything(text: str) -> Spans:
    return _find((MAIL, PHONE, *KEYS), text)


def _find(patterns: Sequence[re.Pattern[str]], text: str) -> Spans:
    return [found.span() for pattern in patterns for found in pattern.finditer(text)]
