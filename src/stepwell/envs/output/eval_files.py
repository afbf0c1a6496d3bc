"""The files of an evaluation: metrics.json, and samples.jsonl if there are samples."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def write_evaluation(
    folder: Path,
    metrics: Mapping[str, Any],
    *,
    task: str,
    model_name: str | None,
    seconds: float,
    generation_parameters: Mapping[str, Any],
    samples: Sequence[Any],
) -> None:
    general = {
        "model_name": model_name,
        "total_evaluation_time_seconds": str(seconds),
        "generation_parameters": dict(generation_parameters),
    }
    results = {f"atropos|{task}|0": dict(metrics), "all": dict(metrics)}
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    (folder / "metrics.json").write_text(json.dumps({"config_general": general, "results": results}, indent=2))
    if samples:
        (folder / "samples.jsonl").write_text("".join(f"{json.dumps(sample)}\n" for sample in samples))
