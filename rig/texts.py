"""The texts that the fake engine wrote: as a client reads them, and as a trainer gets them."""

from collections.abc import Iterable

import orjson

from stepwell.steps.step import Step

BYTES = 256
"""Tokens below are a byte of the text, in the vocabulary of the fake engine."""


def text_of(body: bytes) -> str | None:
    """The text of a chat's answer, streamed or not; None if the body is no answer, or not a whole one."""
    if body.startswith(b"{"):
        return str(orjson.loads(body)["choices"][0]["message"]["content"])
    events = [line.removeprefix(b"data: ") for line in body.splitlines() if line.startswith(b"data: ")]
    if not events or events.pop() != b"[DONE]":
        return None
    chunks = [orjson.loads(event) for event in events]
    if any("error" in chunk for chunk in chunks):
        return None
    return "".join(choice["delta"].get("content") or "" for chunk in chunks for choice in chunk["choices"])


def texts_of(steps: Iterable[Step]) -> list[tuple[str, str]]:
    """The trajectory and the text of each step, as the fake engine wrote it."""
    return [
        (step.trajectory_uid, bytes(token for token in step.response_ids.tolist() if token < BYTES).decode())
        for step in steps
    ]
