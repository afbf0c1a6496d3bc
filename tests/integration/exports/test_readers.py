"""What others read exports with: datasets and polars, as they are."""

from pathlib import Path

import datasets
import polars as pl
import pytest
from stepwell.exports.export_files import open_target

from stepwell.exports.shapes import ExportShape, PreferenceShape, SftShape, StepsShape
from tests.unit.exports.stored import stored, turns

GROUPS = [
    stored(turns("a", 2, reward=1.0, metadata={"größe": 1}), turns("b", 1, reward=0.0, response_logprobs=None)),
    stored(turns("c", 1, "q", untrainable="greedy: temperature 0"), source="maths", channel="validation"),
]
PREFERENCES = PreferenceShape(lambda ids: " ".join(map(str, ids)), 0.0)


def written(path: Path, shape: ExportShape | None = None) -> str:
    kind = {".parquet": "parquet", ".jsonl": "jsonl"}.get(path.suffix, "dataset")
    with open_target(str(path), kind, shape or StepsShape()) as target:
        target.write(GROUPS)
    return str(path)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


def test_datasets_reads_a_datasets_folder_by_its_name(tmp_path: Path) -> None:
    found = datasets.load_dataset(written(tmp_path / "x"), split="train", cache_dir=str(tmp_path / "cache"))
    assert found["trajectory_uid"][:] == ["a", "a", "b", "c"]
    assert found[0]["prompt_ids"] == [1, 2]
    assert found[0]["response_logprobs"] == [-0.5, -0.5]
    assert found[2]["response_logprobs"] is None
    assert found[3]["channel"] == "validation"


@pytest.mark.parametrize(("name", "builder"), [("x.parquet", "parquet"), ("x.jsonl", "json")])
def test_datasets_reads_single_files(tmp_path: Path, name: str, builder: str) -> None:
    files = written(tmp_path / name)
    found = datasets.load_dataset(builder, data_files=files, split="train", cache_dir=str(tmp_path / "cache"))
    assert found["group"][:] == [0, 0, 0, 1]
    assert found[0]["response_ids"] == [3, 4]
    assert found["reward"][:] == [1.0, 1.0, 0.0, None]


def test_datasets_reads_pairs_under_the_names_that_trainers_know(tmp_path: Path) -> None:
    files = written(tmp_path / "x.parquet", PREFERENCES)
    found = datasets.load_dataset("parquet", data_files=files, split="train", cache_dir=str(tmp_path / "cache"))
    assert found[0]["prompt"] == "1 2"
    assert (found[0]["chosen_uid"], found[0]["rejected_uid"]) == ("a", "b")


def test_polars_reads_every_form(tmp_path: Path) -> None:
    written(tmp_path / "x")
    frames = [
        pl.scan_parquet(tmp_path / "x" / "data" / "*.parquet").collect(),
        pl.read_parquet(written(tmp_path / "x.parquet")),
        pl.read_ndjson(written(tmp_path / "x.jsonl")),
    ]
    for frame in frames:
        assert frame["trajectory_uid"].to_list() == ["a", "a", "b", "c"]
        assert frame["prompt_ids"][0].to_list() == [1, 2]
        assert frame["untrainable"].to_list() == [None, None, None, "greedy: temperature 0"]
        mean = frame.group_by("trajectory_uid").agg(pl.col("reward").sum()).filter(pl.col("trajectory_uid") == "a")
        assert mean["reward"].to_list() == [2.0]


def test_polars_reads_examples(tmp_path: Path) -> None:
    frame = pl.read_parquet(written(tmp_path / "x.parquet", SftShape(None, None)))
    assert frame["labels"][0].to_list() == [-100, -100, 3, 4]
