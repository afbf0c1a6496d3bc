"""docs/api.md says what the gateway's OpenAPI document says."""

import subprocess
import sys
from pathlib import Path

CHECKOUT = Path(__file__).parents[2]
PROGRAM = "import api_docs, sys; sys.stdout.write(api_docs.page(api_docs.document()))"


def test_the_page_lists_every_call_as_it_is() -> None:
    written = subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd=CHECKOUT / "scripts", capture_output=True, text=True, check=True
    ).stdout
    assert (CHECKOUT / "docs" / "api.md").read_text() == written, "run scripts/api_docs.py"
    for path in ("chat/completions", "init_trajectory", "submit_steps", "engines", "complete_trajectory"):
        assert path in written
