"""`encrypted_content`: the seal of a step and the reasoning's text, for clients that send nothing else back.

The text is encoded, not encrypted: it is the client's own answer.
"""

from base64 import urlsafe_b64decode, urlsafe_b64encode
from contextlib import suppress

PREFIX = "sw1."
LONGEST_TEXT = 65_536
"""Characters. Of a longer reasoning only the step is sealed."""


def encode_reasoning(text: str) -> str:
    """A content to attach a seal to."""
    kept = text if len(text) <= LONGEST_TEXT else ""
    return PREFIX + urlsafe_b64encode(kept.encode()).decode()


def decode_reasoning(content: str) -> str:
    """The text in a content whose seal is detached; empty if it has none."""
    if content.startswith(PREFIX):
        with suppress(ValueError):
            return urlsafe_b64decode(content[len(PREFIX) :]).decode()
    return ""
