"""An exception as one short text for whoever wrote the code that raised it: what, and where."""

import sysconfig
import traceback
from pathlib import Path

import stepwell

TEXT_KEPT = 2_000
"""Characters; longer texts are cut in the middle, for both ends say something."""
NOT_THEIRS = (str(Path(stepwell.__file__).parent), *sysconfig.get_paths().values(), "<frozen")
"""Where the code of whoever is told cannot be."""


def blame(failure: BaseException) -> str:
    """Its kind and text, and the place nearest to the failure that is not in Stepwell, Python or a package."""
    said = f"{type(failure).__name__}: {_text(failure)}".removesuffix(": ")
    frames = [f for f in traceback.extract_tb(failure.__traceback__) if not f.filename.startswith(NOT_THEIRS)]
    if isinstance(failure, SyntaxError) or not frames:
        return shortened(said)
    return shortened(f"{said} ({Path(frames[-1].filename).name}, line {frames[-1].lineno}, in {frames[-1].name})")


def shortened(text: str, limit: int = TEXT_KEPT) -> str:
    if len(text) <= limit:
        return text
    half = limit // 2
    return f"{text[:half]} […] {text[-half:]}"


def _text(failure: BaseException) -> str:
    """Exceptions are someone's classes: asking one for its text may fail as well."""
    try:
        return str(failure)
    except BaseException:  # noqa: BLE001 - see above
        return "(its text cannot be shown)"
