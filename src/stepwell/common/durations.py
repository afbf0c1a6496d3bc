"""Lengths of time as people write them."""

import re
from collections.abc import Mapping

DURATION = re.compile(r"(?P<count>\d{1,9}(\.\d{1,9})?)(?P<unit>[smhdw])")
SECONDS: Mapping[str, float] = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0, "w": 604_800.0}


def read_duration(text: str) -> float | None:
    """Reads a duration in seconds; None if the text is not a number with s, m, h, d or w behind it."""
    found = DURATION.fullmatch(text.strip())
    return None if found is None else float(found["count"]) * SECONDS[found["unit"]]
