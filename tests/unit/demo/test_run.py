import json
from pathlib import Path

from stepwell.demo.run import DemoResult


def test_a_result_is_written_as_json_and_as_one_line(tmp_path: Path) -> None:
    result = DemoResult(
        task="rev", seed=0, updates=150, start=0.14, end=0.96, samples_per_second=110.0, seconds=240.0, largest_gap=2e-6
    )
    result.write(tmp_path / "outcome.json")

    assert json.loads((tmp_path / "outcome.json").read_text())["end"] == 0.96
    assert "0.140 before, 0.960 after 150 updates" in result.text()
    assert "\n" not in result.text()
