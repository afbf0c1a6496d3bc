"""Is what a subject answers what the engine said? Looked at once, before anything is measured."""

import json
import urllib.request

from benchmarks.gateway_rig import canned
from benchmarks.gateway_rig.subjects import Door, Subject

HIDING = ("bare_recorder", "stepwell")
"""These must take out what the client did not ask for: it is part of the work that is compared."""


def check_answers(subject: Subject) -> None:
    """Raise unless both kinds of call bring the engine's text."""
    (door,) = subject.open(1)
    for stream in (False, True):
        raw = _call(subject, door, stream=stream)
        text = _streamed_text(raw) if stream else json.loads(raw)["choices"][0]["message"]["content"]
        assert text == canned.make_reply().text, f"{subject.name} answered something else: {text[:200]}"
        if subject.name in HIDING:
            assert b"token_ids" not in raw, f"{subject.name} gave away what was not asked for"
            assert b'"bytes"' not in raw, f"{subject.name} gave away what was not asked for"
    subject.settle(2)
    subject.check(2)


def _call(subject: Subject, door: Door, *, stream: bool) -> bytes:
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {door.key}"}
    body = canned.request_body(stream=stream)
    request = urllib.request.Request(subject.server.url + door.path, body, headers)
    with urllib.request.urlopen(request, timeout=60) as answer:
        raw: bytes = answer.read()
        return raw


def _streamed_text(raw: bytes) -> str:
    events = raw.decode().split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""], events[-2:]
    chunks = [json.loads(event.removeprefix("data: ")) for event in events[:-2]]
    return "".join(choice["delta"].get("content") or "" for chunk in chunks for choice in chunk["choices"])
