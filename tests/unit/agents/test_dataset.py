from collections.abc import Iterator
from dataclasses import asdict, replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from stepwell.agents.dataset import Dataset, Position
from stepwell.errors import BadRequest

SAMPLES = [{"n": n} for n in range(10)]


def numbers(dataset: Dataset, count: int) -> list[int]:
    return [prompt.sample["n"] for prompt in islice(dataset, count)]


def test_an_epoch_has_every_sample_once_and_the_next_another_order() -> None:
    dataset = Dataset(SAMPLES)
    first, second = numbers(dataset, 10), numbers(dataset, 10)
    assert sorted(first) == sorted(second) == list(range(10))
    assert first != second
    assert first != sorted(first)


def test_the_seed_decides_the_order_and_none_keeps_it() -> None:
    assert numbers(Dataset(SAMPLES, seed=3), 20) == numbers(Dataset(SAMPLES, seed=3), 20)
    assert numbers(Dataset(SAMPLES, seed=3), 10) != numbers(Dataset(SAMPLES, seed=4), 10)
    assert numbers(Dataset(SAMPLES, seed=None), 10) == list(range(10))


def test_a_run_that_goes_on_from_a_stored_position_repeats_nothing_and_leaves_nothing_out() -> None:
    whole = numbers(Dataset(SAMPLES), 20)
    before = Dataset(SAMPLES)
    assert numbers(before, 13) == whole[:13]
    stored = asdict(before.position)
    after = Dataset(SAMPLES, position=Position(**stored))
    assert numbers(after, 7) == whole[13:]


def test_group_names_are_never_given_twice_not_even_by_a_run_resumed_from_an_old_position() -> None:
    dataset = Dataset(SAMPLES)
    old = dataset.position
    uids = [prompt.uid for prompt in islice(dataset, 30)]
    uids += [prompt.uid for prompt in islice(Dataset(SAMPLES, position=old), 30)]
    assert len(set(uids)) == 60


def test_a_groups_sample_is_found_by_its_name_also_after_the_run_was_resumed() -> None:
    dataset = Dataset(SAMPLES)
    prompts = list(islice(dataset, 15))
    resumed = Dataset(SAMPLES, position=dataset.position)
    assert [resumed.find(prompt.uid) for prompt in prompts] == prompts
    assert Dataset(SAMPLES).find(prompts[0].uid) is None, "it is another run's"
    assert resumed.find("anything") is None
    assert resumed.find(f"{dataset.position.run}:99:0:ab") is None


def test_epochs_are_bounded_where_asked() -> None:
    dataset = Dataset(SAMPLES, epochs=2)
    assert dataset.left == 20
    assert len(numbers(dataset, 13)) == 13
    assert dataset.left == 7
    assert len(list(dataset)) == 7
    assert dataset.left == 0
    assert list(dataset) == []
    assert Dataset(SAMPLES).left is None


def test_the_rest_of_an_epoch_ends_with_it() -> None:
    dataset = Dataset(SAMPLES)
    assert len(dataset.rest_of_epoch()) == 10
    numbers(dataset, 4)
    assert len(dataset.rest_of_epoch()) == 6
    assert dataset.position == replace(dataset.position, epoch=2, place=0)


def test_jsonl_is_read_and_what_is_wrong_with_it_is_said_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text('{"n": 0}\n\n{"n": 1, "text": "a\u2028b"}\n')
    assert numbers(Dataset(path, seed=None), 3) == [0, 1, 0]
    path.write_text('{"n": 0}\n{"n": \n')
    with pytest.raises(BadRequest, match=r"data.jsonl, line 2, is not JSON"):
        Dataset(str(path))
    path.write_text('{"n": 0}\n[1]\n')
    with pytest.raises(BadRequest, match="line 2, is a list; a sample is a JSON object"):
        Dataset(path)
    path.write_text("\n")
    with pytest.raises(BadRequest, match="no sample"):
        Dataset(path)
    with pytest.raises(BadRequest, match="cannot be read"):
        Dataset(tmp_path / "none.jsonl")


def test_samples_are_read_by_number_where_that_is_possible_and_one_by_one_else() -> None:
    class Lazy:
        """As a dataset of Hugging Face's: rows are made when they are asked for."""

        def __init__(self) -> None:
            self.asked: list[int] = []

        def __len__(self) -> int:
            return 1_000_000

        def __getitem__(self, index: int) -> dict[str, Any]:
            self.asked.append(index)
            return {"n": index}

    def stream() -> Iterator[dict[str, Any]]:
        yield from SAMPLES

    lazy = Lazy()
    assert len(numbers(Dataset(lazy), 3)) == 3
    assert len(lazy.asked) == 3
    assert numbers(Dataset(stream(), seed=None), 2) == [0, 1]
