import sys
from pathlib import Path

import pytest

from stepwell.errors import BadRequest
from stepwell.rewards.loading import load
from tests.unit.rewards.samples import GRADERS, sample


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path[:])


def test_a_function_is_found_in_a_file_and_named_without_its_folder() -> None:
    function = load(f"{GRADERS}:graded")
    assert function.name == "graders.py:graded"
    assert function.call(sample()) == 1.0
    assert not function.is_async


def test_a_file_is_looked_for_in_the_folder_and_finds_what_is_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rubric_beside.py").write_text("FULL = 3.0")
    (tmp_path / "mine.py").write_text("from rubric_beside import FULL\ndef score(sample): return FULL")
    assert load("mine.py:score").call(sample()) == 3.0


def test_a_function_is_found_in_a_module(tmp_path: Path) -> None:
    (tmp_path / "rewards_of_mine.py").write_text("def score(sample): return 4.0")
    function = load("rewards_of_mine:score")
    assert (function.name, function.call(sample())) == ("rewards_of_mine:score", 4.0)


@pytest.mark.parametrize("name", ["graded_async", "made"])
def test_coroutine_functions_and_objects_called_like_them_are_async(name: str) -> None:
    assert load(f"{GRADERS}:{name}").is_async


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("nowhere.py:score", "there is no file /.*nowhere.py"),
        ("no_such_module:score", "No module named 'no_such_module'"),
        (f"{GRADERS}:missing", "has no 'missing'; its functions are: backtracks, crashes_in_a_thread, graded"),
        (f"{GRADERS}:not_a_function", "graders.py:not_a_function is no function but a int"),
        ("no_such_built_in", "no built-in reward function is called 'no_such_built_in'; your own is named module:func"),
    ],
)
def test_what_cannot_be_found_is_said_in_words(
    name: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(BadRequest, match=words):
        load(name)


def test_options_are_for_built_ins() -> None:
    with pytest.raises(BadRequest, match="options are for built-in functions"):
        load(f"{GRADERS}:graded", {"strict": True})


def test_a_built_in_says_which_option_it_does_not_know() -> None:
    with pytest.raises(BadRequest, match="exact_match cannot be made with these options: .*strictness"):
        load("exact_match", {"strictness": 3})


def test_a_file_that_fails_names_the_line_that_failed(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("import json\n\njson.loads('{')\n")
    with pytest.raises(BadRequest, match=r"JSONDecodeError: .* \(broken.py, line 3, in <module>\)"):
        load("broken.py:score")
