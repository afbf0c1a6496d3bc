"""`stepwell export` without Ray: what cannot be done fails in one line, and leaves nothing."""

from pathlib import Path

import pyarrow.parquet as pq
import pytest

from stepwell import cli
from stepwell.pool.client.batch import make_batch
from stepwell.steps.columns import pack
from tests.unit.exports.stored import turns


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """With an archive of two groups."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "archive").mkdir()
    steps = [*turns("a", 2, "p", reward=1.0), *turns("b", 1, "q", reward=0.0)]
    pq.write_table(make_batch(pack(steps), [2, 1]).to_arrow(), tmp_path / "archive" / "pool-1.parquet")
    return tmp_path


def test_an_archive_is_filtered_into_another_form(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cli.main(["export", "--from", "archive", "--to", "out/good.jsonl", "--reward-min", "0.5", "--since", "1970-01-01"])
    assert capsys.readouterr().out.startswith("wrote out/good.jsonl: 2 rows of 1 trajectories, 2 steps")
    assert len((folder / "out" / "good.jsonl").read_text().splitlines()) == 2


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--to there.parquet", "there.parquet exists already"),
        ("--to x.csv", "'.csv' names no format"),
        ("--to x.parquet --reward-min 5", "nothing was written"),
        ("--to x.parquet --best 2", "--best belongs to --shape sft"),
        ("--to x.parquet --margin 2", "--margin belongs to --shape preferences"),
        ("--to x.parquet --state ready", "--state selects a state in a pool"),
    ],
)
def test_what_cannot_be_done_is_said_in_one_line(
    folder: Path, capsys: pytest.CaptureFixture[str], flags: str, said: str
) -> None:
    (folder / "there.parquet").write_text("mine")
    with pytest.raises(SystemExit):
        cli.main(["export", "--from", "archive", *flags.split()])
    error = capsys.readouterr().err
    assert said in error
    assert len(error.splitlines()) == 1, error
    assert sorted(file.name for file in folder.iterdir()) == ["archive", "there.parquet"]


def test_a_folder_without_anything_to_read_is_said(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["export", "--from", "nothing", "--to", "x.jsonl"])
    assert "there is no Parquet or JSONL file in nothing" in capsys.readouterr().err
