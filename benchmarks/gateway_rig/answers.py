"""Is what a subject answers what the engine said? Looked at once, before anything is measured."""

import json
import urllib.request

from benchmarks.gateway_rig import canned
from benchmarks.gateway_rig.ours import NAME
from benchmarks.gateway_rig.spoken import SPOKEN, events
from benchmarks.gateway_rig.subjects import Door, Subject

HIDING = ("bare_recorder", NAME)
"""These must take out what the client did not ask for: it is part of the work that is compared."""


def check_answers(subject: Subject) -> None:
    """Raise unless both kinds of call bring the engine's text."""
    (door,) = subject.open(1)
    for stream in (False, True):
        raw = _call(subject, door, stream=stream)
        spoken = SPOKEN[subject.dialect]
        text = "".join(map(spoken.piece, events(raw))) if stream else spoken.text(json.loads(raw))
        assert not stream or raw.endswith(spoken.ending), f"{subject.name} ended a stream with {raw[-80:]!r}"
        assert text == canned.make_reply().text, f"{subject.name} answered something else: {text[:200]}"
        if subject.name.startswith(HIDING):
            assert b"token_ids" not in raw, f"{subject.name} gave away what was not asked for"
            assert b'"bytes"' not in raw, f"{subject.name} gave away what was not asked for"
    subject.settle(2)
    subject.check(2)


def _call(subject: Subject, door: Door, *, stream: bool) -> bytes:
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {door.key}"}
    body = SPOKEN[subject.dialect].body(stream, "agent")
    request = urllib.request.Request(subject.server.url + door.path, body, headers)
    with urllib.request.urlopen(request, timeout=60) as answer:
        raw: bytes = answer.read()
        return raw
