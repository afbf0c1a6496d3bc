from math import nan
from pathlib import Path

from stepwell.demo.screen import bar, draw, write_picture


def test_a_bar_has_the_height_of_its_reward_and_future_updates_are_blank() -> None:
    drawn = draw([0.0, 0.5, 1.0], 4, height=4).splitlines()

    assert [line[6:] for line in drawn[:-1]] == ["  █ ", "  █ ", " ██ ", " ██ "]
    assert drawn[-1] == " 0.0 └────"


def test_more_updates_than_columns_share_them() -> None:
    assert draw([0.0, 1.0] * 50, 100, width=50, height=2).splitlines()[1][6:] == "█" * 50


def test_an_unknown_reward_is_left_out() -> None:
    assert draw([nan, 1.0], 2, width=1, height=1).splitlines()[0].endswith("█")


def test_a_bar_grows_by_eighths() -> None:
    assert [bar(reward, width=2) for reward in (0.0, 0.25, 0.5, 1.0)] == ["", "▌", "█", "██"]


def test_the_picture_is_a_png(tmp_path: Path) -> None:
    write_picture([0.1, 0.5, 0.9], [(0, 0.1), (3, 0.9)], "rev, seed 0", tmp_path / "reward.png")

    assert (tmp_path / "reward.png").read_bytes().startswith(b"\x89PNG")
