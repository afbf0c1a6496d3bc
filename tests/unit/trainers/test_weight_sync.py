"""What a weight sync asks of engines, in which order, and what it makes of their answers."""

import multiprocessing
import re
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import stepwell.trainers.weight_sync
from rig.gateways import free_port
from rig.waiting import wait_until
from stepwell.errors import BadRequest, Conflict, SyncFailed
from stepwell.trainers.transfers import CheckpointTransfer
from stepwell.trainers.weight_sync import WeightSync, probe_logprobs
from tests.unit.trainers.models import Recurrent
from tests.unit.trainers.scripted_engine import ScriptedEngine, serve

PROBE = [1, 2, 3, 4]
LABEL = "/update_weight_version"
PAUSE = ["/weight_info", "/pause?mode=keep", "/weight_info", LABEL]
CHANGE = [*PAUSE, "/collective_rpc", "/reset_prefix_cache", LABEL, "/resume"]
FIRST_CHANGE = [*PAUSE, "/collective_rpc", "/weight_checker", *CHANGE[len(PAUSE) + 1 :]]
"""These engines have no checksums, and are asked for them once."""
PROOF = ["/weight_info", "/v1/completions"]


class Versions:
    def __init__(self) -> None:
        self.told: list[int] = []
        self.announced = 0

    def set_policy_version(self, version: int, *, check: bool = True) -> None:
        assert not check, "the engines themselves have told the version"
        self.told.append(version)

    def announce_sync(self) -> None:
        self.announced += 1

    def engines(self) -> Sequence[str]:
        return ()


@pytest.fixture
def engines() -> Iterator[list[ScriptedEngine]]:
    with ExitStack() as stack:
        yield [stack.enter_context(serve(ScriptedEngine())) for _ in range(2)]


@pytest.fixture
def model(engines: list[ScriptedEngine]) -> torch.nn.Module:
    """Whose log-probabilities the engines tell."""
    model = Recurrent(dropout=0.5)
    for engine in engines:
        engine.logprobs = probe_logprobs(model, PROBE)
    return model


def weight_sync(engines: list[ScriptedEngine], folder: Path, **options: Any) -> WeightSync:
    options = {"probe": PROBE, "transfer": CheckpointTransfer(folder), **options}
    return WeightSync([engine.url for engine in engines], **options)


def test_every_engine_is_paused_changed_named_and_resumed_and_the_pool_told(
    engines: list[ScriptedEngine], model: torch.nn.Module, tmp_path: Path
) -> None:
    pool = Versions()
    report = weight_sync(engines, tmp_path / "w", pool=pool, engine_key="secret").sync(model, 7)
    for engine in engines:
        assert engine.calls == [*FIRST_CHANGE, *PROOF]
        assert engine.bodies["/update_weight_version"] == {"new_version": "7"}
        assert engine.bodies["/collective_rpc"]["method"] == "reload_weights"
        assert engine.was_paused_at["/collective_rpc"]
        assert engine.keys == {"Bearer secret"}
        path = Path(engine.bodies["/collective_rpc"]["kwargs"]["weights_path"])
        written = load_file(path / "model.safetensors")
        assert all(torch.equal(written[name], value) for name, value in model.state_dict().items())
    assert pool.told == [7]
    assert report.version == 7
    assert report.logprob_gap == pytest.approx(0.0, abs=1e-6)
    assert report.paused_seconds <= report.seconds
    assert model.training


def test_a_sync_announces_itself_until_it_is_closed(
    engines: list[ScriptedEngine], model: torch.nn.Module, tmp_path: Path
) -> None:
    pool = Versions()
    sync = weight_sync(engines, tmp_path / "w", pool=pool, background=False)
    sync.catch_up()
    assert pool.announced == 1, "before its first sync too: engines wait for it"
    sync.sync(model, 7)
    assert pool.announced == 2
    sync.close()
    sync.catch_up()
    assert pool.announced == 2


def test_a_slow_engine_is_waited_for_with_a_word_and_one_that_does_not_listen_is_left_out(
    engines: list[ScriptedEngine],
    model: torch.nn.Module,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(stepwell.trainers.weight_sync, "QUESTION_TIMEOUT", 0.2)
    slow = engines[0]
    slow.slow_answers = 2
    dead = f"http://127.0.0.1:{free_port()}"
    sync = WeightSync([slow.url, dead], probe=PROBE, transfer=CheckpointTransfer(tmp_path / "w"), timeout=30.0)
    try:
        report = sync.sync(model, 7)
    finally:
        slow.has_time.set()
    assert list(report.left_out) == [dead]
    assert slow.weight_version == "7"
    waits = [record.getMessage() for record in caplog.records if "slow to answer" in record.getMessage()]
    assert len(waits) == 2
    assert all(line.startswith(f"engine {slow.url} is slow to answer; new weights wait ") for line in waits)


def test_closed_it_waits_for_a_look_that_has_begun_and_asks_the_pool_no_more(
    engines: list[ScriptedEngine], model: torch.nn.Module, tmp_path: Path
) -> None:
    asked, may_answer, has_ended = threading.Event(), threading.Event(), threading.Event()

    class Slow(Versions):
        def announce_sync(self) -> None:
            asked.set()
            may_answer.wait(10)
            super().announce_sync()

    sync = weight_sync(engines, tmp_path / "w", pool=Slow(), background=False)
    looking = threading.Thread(target=sync.catch_up)
    looking.start()
    assert asked.wait(10)

    def close() -> None:
        sync.close()
        has_ended.set()

    threading.Thread(target=close).start()
    assert not has_ended.wait(0.2)
    may_answer.set()
    assert has_ended.wait(10)
    looking.join(10)
    assert not looking.is_alive()


@pytest.mark.parametrize(
    "at", ["/pause", LABEL, "/collective_rpc", "/weight_checker", "/reset_prefix_cache", "/resume"]
)
def test_the_pool_is_not_told_of_weights_that_no_engine_has(
    engines: list[ScriptedEngine], model: torch.nn.Module, tmp_path: Path, at: str
) -> None:
    pool = Versions()
    for engine in engines:
        engine.fails_at = at
    with pytest.raises(SyncFailed, match=rf"POST {engines[1].url}{at}.* answered 500: .*told to fail"):
        weight_sync(engines, tmp_path / "w", pool=pool).sync(model, 7)
    assert pool.told == []


def test_an_engine_that_cannot_be_resumed_is_named(
    engines: list[ScriptedEngine], model: torch.nn.Module, tmp_path: Path
) -> None:
    engines[0].fails_at = "/resume"
    report = weight_sync(engines, tmp_path / "w").sync(model, 7)
    assert (
        f"may still be paused; POST /resume there: POST {engines[0].url}/resume answered 500"
        in report.left_out[engines[0].url]
    )
    assert not engines[1].is_paused


def test_a_cache_of_old_weights_is_not_let_pass(
    engines: list[ScriptedEngine], model: torch.nn.Module, tmp_path: Path
) -> None:
    engines[0].empties_cache = False
    report = weight_sync(engines, tmp_path / "w").sync(model, 7)
    assert "did not empty its prefix cache" in report.left_out[engines[0].url]
    assert (engines[0].weight_version, engines[0].is_paused) == ("changing from default", True)


def test_an_engine_that_tells_another_version_is_caught(
    engines: list[ScriptedEngine], model: torch.nn.Module, tmp_path: Path
) -> None:
    engines[1].keeps_version = True
    report = weight_sync(engines, tmp_path / "w").sync(model, 7)
    assert report.left_out == {engines[1].url: f"{engines[1].url} was given version 7 and says it has default"}


@pytest.mark.parametrize("off", [0.25, float("nan")])
def test_an_engine_that_computes_with_other_weights_is_caught(
    engines: list[ScriptedEngine], model: torch.nn.Module, tmp_path: Path, off: float
) -> None:
    engines[1].logprobs[1] += off
    report = weight_sync(engines, tmp_path / "w").sync(model, 7)
    why = report.left_out[engines[1].url]
    assert re.match(rf"^{engines[1].url} does not compute with.* up to {off:g} off.*On a CPU", why)
    assert (engines[1].weight_version, engines[1].is_paused) == ("changing", True)


def test_tensors_by_name_are_compared_by_the_log_probabilities_that_come_with_them(
    engines: list[ScriptedEngine], model: torch.nn.Module, tmp_path: Path
) -> None:
    """A trainer whose model is in another process tells them."""
    logprobs = probe_logprobs(model, PROBE)
    engines[1].logprobs[1] += 0.25
    sync = weight_sync(engines, tmp_path / "w")

    report = sync.sync(iter(model.state_dict().items()), 7, logprobs=logprobs)

    assert list(report.left_out) == [engines[1].url]
    assert report.logprob_gap == pytest.approx(0.0, abs=1e-6)
    with pytest.raises(BadRequest, match="pass its logprobs"):
        sync.sync(iter(model.state_dict().items()), 8)


def test_a_wider_tolerance_is_kept_to(engines: list[ScriptedEngine], model: torch.nn.Module, tmp_path: Path) -> None:
    engines[1].logprobs[1] += 0.15
    report = weight_sync(engines, tmp_path / "w", tolerance=0.2).sync(model, 7)
    assert report.logprob_gap == pytest.approx(0.15, abs=1e-5)


def test_an_engine_that_is_not_there_is_named_with_what_was_asked(model: torch.nn.Module, tmp_path: Path) -> None:
    sync = WeightSync(["http://127.0.0.1:1"], transfer=CheckpointTransfer(tmp_path / "w"), probe=PROBE)
    with pytest.raises(SyncFailed, match=r"^GET http://127.0.0.1:1/weight_info: "):
        sync.sync(model, 1)


def test_weights_without_a_model_are_synced_where_there_is_no_probe(
    engines: list[ScriptedEngine], model: torch.nn.Module, tmp_path: Path
) -> None:
    state = dict(model.state_dict())
    with pytest.raises(BadRequest, match="probe"):
        weight_sync(engines, tmp_path / "w").sync(state, 1)
    assert weight_sync(engines, tmp_path / "w", probe=()).sync(state, 1).logprob_gap is None


def test_a_tensor_with_two_names_is_written_once(engines: list[ScriptedEngine], tmp_path: Path) -> None:
    tied = torch.nn.ModuleDict({"embed": torch.nn.Embedding(4, 3), "head": torch.nn.Linear(3, 4, bias=False)})
    tied["head"].weight = tied["embed"].weight
    weight_sync(engines, tmp_path / "w", probe=()).sync(tied, 1)
    assert load_file(tmp_path / "w" / "a" / "model.safetensors").keys() == {"embed.weight"}


def test_two_places_are_used_in_turn_and_are_whole_models(
    engines: list[ScriptedEngine], model: torch.nn.Module, tmp_path: Path
) -> None:
    like = tmp_path / "like"
    like.mkdir()
    for name in ("config.json", "tokenizer.json", "model.safetensors", "model.safetensors.index.json"):
        (like / name).write_text("{}")
    sync = weight_sync(engines, tmp_path / "w", transfer=CheckpointTransfer(tmp_path / "w", like=like))
    used = []
    for version in range(4):
        sync.sync(model, version)
        used.append(Path(engines[0].bodies["/collective_rpc"]["kwargs"]["weights_path"]).name)
    assert used == ["a", "b", "a", "b"]
    for place in ("a", "b"):
        files = {file.name for file in (tmp_path / "w" / place).iterdir()}
        assert files == {"config.json", "tokenizer.json", "model.safetensors"}


def test_a_second_sync_of_this_process_waits_for_the_first(
    engines: list[ScriptedEngine], model: torch.nn.Module, tmp_path: Path
) -> None:
    sync = weight_sync(engines[:1], tmp_path / "w")
    engines[0].may_answer.clear()
    first = threading.Thread(target=sync.sync, args=(model, 1))
    first.start()
    wait_until(lambda: "/collective_rpc" in engines[0].calls, "the first sync to be under way")
    second = threading.Thread(target=sync.sync, args=(model, 2))
    second.start()
    second.join(0.2)
    assert second.is_alive()
    assert engines[0].calls == CHANGE[:5]
    engines[0].may_answer.set()
    first.join()
    second.join()
    assert engines[0].calls == [*FIRST_CHANGE, *PROOF, *CHANGE, *PROOF]
    assert engines[0].weight_version == "2"


def _hold(folder: Path, is_held: Any, may_end: Any) -> None:
    with CheckpointTransfer(folder).exclusive():
        is_held.set()
        may_end.wait(300)


def test_a_sync_while_another_process_syncs_is_refused_before_an_engine_is_asked(
    engines: list[ScriptedEngine], model: torch.nn.Module, tmp_path: Path
) -> None:
    start = multiprocessing.get_context("spawn")
    is_held, may_end = start.Event(), start.Event()
    other = start.Process(target=_hold, args=(tmp_path / "w", is_held, may_end))
    other.start()
    try:
        assert is_held.wait(300)
        with pytest.raises(Conflict, match=rf"^process {other.pid} is syncing weights through "):
            weight_sync(engines, tmp_path / "w").sync(model, 1)
        assert engines[0].calls == []
    finally:
        may_end.set()
        other.join()
    weight_sync(engines, tmp_path / "w").sync(model, 1)


def test_an_engine_kind_that_is_unknown_or_cannot_take_weights_is_refused(tmp_path: Path) -> None:
    transfer = CheckpointTransfer(tmp_path)
    with pytest.raises(BadRequest, match="no engine kind is called 'sglong'; there are: vllm, openai"):
        WeightSync(["http://e"], transfer=transfer, engine_kind="sglong")
    with pytest.raises(BadRequest, match="http://e: a plain OpenAI server cannot be given weights"):
        WeightSync(["http://e"], transfer=transfer, engine_kind="openai")
