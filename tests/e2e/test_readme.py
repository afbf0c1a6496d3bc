"""The README's five-minute start, with the code of the checkout; tests/e2e/test_wheel.py does it with the wheel."""

from pathlib import Path

from tests.e2e.readme_path import follow
from tests.rig.shells import fresh_shell
from tests.rig.vllm_server import VllmServer


def test_the_five_minute_start_works(vllm: VllmServer, tmp_path: Path) -> None:
    with fresh_shell(tmp_path) as shell:
        follow(shell, vllm.url)
