import time
from collections.abc import Callable

import pytest

from stepwell.gateway.recording import redaction_examples as examples

PEM = "-----BEGIN RSA PRIVATE KEY-----\nMIIBOgIB/+aA=\n-----END RSA PRIVATE KEY-----"
JWT = "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.SflKxwRJSMeKKF2QT4"


def found(find: Callable[[str], examples.Spans], text: str) -> list[str]:
    return [text[start:end] for start, end in find(text)]


@pytest.mark.parametrize(
    ("text", "spans"),
    [
        ("write to alice.liddell+x@mail.example.org.", ["alice.liddell+x@mail.example.org"]),
        ("<jörg@example.de>,bob@b.co", ["jörg@example.de", "bob@b.co"]),
        ("a @ b, @name, x@localhost", []),
    ],
)
def test_mail_addresses(text: str, spans: list[str]) -> None:
    assert found(examples.mail_addresses, text) == spans


@pytest.mark.parametrize(
    ("text", "spans"),
    [
        ("call +49 170 1234567 now", ["+49 170 1234567"]),
        ("(030) 1234-5678 or 0041 44 668 18 00", ["(030) 1234-5678", "0041 44 668 18 00"]),
        ("on 01.02.2026, in 2026-01-02, pi is 3.14159265358979, a0123456789", []),
    ],
)
def test_phone_numbers(text: str, spans: list[str]) -> None:
    assert found(examples.phone_numbers, text) == spans


@pytest.mark.parametrize(
    ("text", "spans"),
    [
        ("key=sk-proj-abcDEF123456_7890-xyz.", ["sk-proj-abcDEF123456_7890-xyz"]),
        ("ghp_0123456789abcdefABCD AKIAIOSFODNN7EXAMPLE", ["ghp_0123456789abcdefABCD", "AKIAIOSFODNN7EXAMPLE"]),
        (f"Bearer {JWT}", [JWT]),
        (f"{PEM}\nend", [PEM]),
        ("task-force-of-the-whole-department, sk-short", []),
    ],
)
def test_keys(text: str, spans: list[str]) -> None:
    assert found(examples.keys, text) == spans


@pytest.mark.parametrize(
    "piece",
    ["a", "a.", "0", "0 ", "(0", "sk-", "eyJaaaaaaaaaa.", "eyJaaaaaaaaaa-", "a@b.", "-----BEGIN PRIVATE KEY-----"],
)
def test_the_time_grows_with_the_text_and_not_with_its_square(piece: str) -> None:
    def seconds(length: int) -> float:
        text = piece * (length // len(piece))
        began = time.process_time()
        examples.everything(text)
        return time.process_time() - began

    assert min(seconds(400_000) for _ in range(2)) < 16 * max(seconds(100_000), 0.01)
