"""`python -m stepwell.envs FILE` from another folder, for files that lie in packages and import from them."""

import subprocess
import sys
from pathlib import Path

import pytest

ENVIRONMENT = """
from atroposlib.envs.base import BaseEnv
{imports}

class MyEnv(BaseEnv):
    async def get_next_item(self):
        return 1

    async def collect_trajectory(self, item):
        score_of.calls = getattr(score_of, "calls", 0) + 1
        return {{"tokens": [1, 7], "masks": [-100, 7], "scores": score_of(score_of.calls)}}, []

    async def postprocess_histories(self, group):
        return {{**group, "advantages": [], "ref_logprobs": [], "messages": []}}

if __name__ == "__main__":
    MyEnv.cli()
"""
SCORES = "def score_of(number):\n    return float(number % 2)\n"
FILES = {
    "beside": ("environments/mine.py", "from scores import score_of", "environments/scores.py"),
    "relative": ("environments/mine.py", "from .scores import score_of", "environments/scores.py"),
    "a folder of the file's name": (
        "environments/mine/mine.py",
        "from .scores import score_of",
        "environments/mine/scores.py",
    ),
    "two levels up": ("environments/games/mine.py", "from ..scores import score_of", "environments/scores.py"),
    "by the name of a folder above": (
        "environments/games/mine.py",
        "from environments.games.rules.scores import score_of",
        "environments/games/rules/scores.py",
    ),
}


@pytest.mark.parametrize("case", FILES)
def test_a_file_finds_its_modules_from_any_folder(case: str, tmp_path: Path) -> None:
    file, imports, scores = FILES[case]
    root, elsewhere = tmp_path / "root", tmp_path / "elsewhere"
    elsewhere.mkdir()
    written = {file: ENVIRONMENT.format(imports=imports), scores: SCORES}
    for name, text in written.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    command = [sys.executable, "-m", "stepwell.envs", str(root / file), "process", "--groups", "1"]
    done = subprocess.run(command, cwd=elsewhere, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert '"scores": [1.0, 0.0, 1.0, 0.0]' in (elsewhere / "groups" / "groups.jsonl").read_text().replace(":[", ": [")


def test_a_missing_library_module_is_one_line(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("from atroposlib.envs.reward_fns import registry\n")
    command = [sys.executable, "-m", "stepwell.envs", str(file), "process"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert done.stderr == (
        "mine.py: atroposlib.envs.reward_fns is a module of atroposlib, which is not installed:"
        " pip install --no-deps atroposlib==0.4.0\n"
    )
