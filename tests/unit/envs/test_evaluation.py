"""EvalBase: metrics are averaged over the items, and written as those of an environment."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from stepwell.envs.config import APIServerConfig
from stepwell.envs.evaluation import EvalBase, eval_runner, evaluate_log, pass_at_k
from stepwell.envs.servers import ServerManager


class Halves(EvalBase):
    def setup_data(self) -> list[Any]:
        return [0, 1, 2, 3]

    async def run_item(self, server: ServerManager, data_item: Any) -> tuple[dict[str, float], Any]:
        return {"accuracy": float(data_item % 2)}, {"item": data_item}


async def test_metrics_are_means_and_are_written_with_their_samples(tmp_path: Path) -> None:
    server = ServerManager([APIServerConfig(model_name="tiny")])
    evaluation = Halves(pass_at_n=2, pass_at_n_samples=4, temperature=0.5, eval_dir=str(tmp_path / "results"))
    assert await evaluation(server) == {"accuracy": 0.5}
    await server.close()
    written = json.loads((tmp_path / "results" / "metrics.json").read_text())
    assert written["results"] == {"atropos|Halves@2:4|0": {"accuracy": 0.5}, "all": {"accuracy": 0.5}}
    general = written["config_general"]
    assert general["model_name"] == "tiny"
    assert general["generation_parameters"] == {"n": 4, "temperature": 0.5, "top_p": 1.0, "max_tokens": -1}
    samples = [json.loads(line) for line in (tmp_path / "results" / "samples.jsonl").read_text().splitlines()]
    assert samples == [{"item": number} for number in range(4)]


async def test_a_wrong_flag_is_told_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["/here/halves.py", "--server_ulr", "http://127.0.0.1:9/v1"])
    with pytest.raises(SystemExit) as ended:
        await eval_runner(Halves())
    assert ended.value.code == 2
    said = "halves.py: unrecognized arguments: --server-ulr http://127.0.0.1:9/v1; did you mean --server-url?\n"
    assert capsys.readouterr().err == said


def test_without_a_folder_nothing_is_written_and_the_log_says_so(caplog: pytest.LogCaptureFixture) -> None:
    evaluate_log({"accuracy": 1.0}, task_name="halves")
    assert "an evaluation is not saved: eval_dir is not set" in caplog.text


@pytest.mark.parametrize(
    ("samples", "right", "k", "probability"), [(4, 0, 1, 0.0), (4, 2.0, 1, 0.5), (4, 2, 2, 5 / 6), (4, 3, 2, 1.0)]
)
def test_pass_at_k(samples: int, right: float, k: int, probability: float) -> None:
    assert pass_at_k(samples, right, k) == pytest.approx(probability)
