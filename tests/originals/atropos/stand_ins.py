"""Puts a row's stand-ins in, in the process of the environment, before its file runs.

There is none for what is not named: a data set or a tokenizer without a row ends the run with its name.
"""

import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from tests.originals.atropos.row import Data, Row, Rows

SPLITS = ("train", "test", "validation")


class NoStandIn(LookupError):
    pass


def install(row: Row, tokenizer: Path) -> None:
    sys.modules.update(row.packages)
    _replace_load_dataset(row.data)
    _replace_tokenizers(row.tokenizers, tokenizer)
    if row.prepare is not None:
        row.prepare(Path.cwd())


def _replace_load_dataset(data: Mapping[str, Data]) -> None:
    import datasets

    original = datasets.load_dataset

    def load_dataset(path: str, name: str | None = None, **options: Any) -> Any:
        if path in ("json", "csv", "parquet"):
            return original(path, name, **options)
        known = data.get(f"{path}:{name}", data.get(path))
        if known is None:
            raise NoStandIn(f"no rows stand in for the data set {path}:{name} ({options})")
        return _loaded(known, options.get("split"), partial(_table, streaming=bool(options.get("streaming"))))

    datasets.load_dataset = load_dataset


def _loaded(data: Data, split: Any, table: Callable[[Rows], Any]) -> Any:
    import datasets

    splits = data if isinstance(data, Mapping) else dict.fromkeys(SPLITS, data)
    if split is None:
        return datasets.DatasetDict({name: table(rows) for name, rows in splits.items()})
    name, _, part = str(split).partition("[")
    if name not in splits:
        raise NoStandIn(f"no rows stand in for the split {split}; there are {', '.join(splits)}")
    start, _, end = part.rstrip("]").partition(":")
    return table(splits[name][_bound(start) : _bound(end)])


def _bound(text: str) -> int | None:
    """Of a split's slice; a share of so few rows is all of them."""
    return int(text) if text.isdigit() else None


def _table(rows: Rows, *, streaming: bool) -> Any:
    import datasets

    table = datasets.Dataset.from_list(list(rows))
    return table.to_iterable_dataset() if streaming else table


def _replace_tokenizers(names: Any, tiny: Path) -> None:
    import transformers

    original = transformers.AutoTokenizer.from_pretrained

    def from_pretrained(name: Any, *args: Any, **options: Any) -> Any:
        if str(name) in names:
            name = str(tiny)
        elif not Path(name).is_dir():
            raise NoStandIn(f"no tokenizer stands in for {name}")
        return original(name, *args, **options)

    transformers.AutoTokenizer.from_pretrained = from_pretrained
