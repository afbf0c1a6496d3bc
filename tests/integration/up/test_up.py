"""`stepwell up`, the command itself, with real Ray and a fake engine: what it starts, restarts and leaves behind."""

import json
import os
import re
import signal
import stat
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from rig.engine_proxy import EngineProxy
from rig.fake_engine import FakeEngine
from rig.gateways import free_port
from rig.ray_cluster import SETTINGS, RayCluster
from rig.shells import Shell, fresh_shell
from rig.threads import in_thread
from rig.waiting import answers, wait_until
from stepwell.commands.processes import HOW_TO_START
from stepwell.pool.client import DataPool, PoolClient

REWARD = "def score(sample):\n    return 0.5\n"


@dataclass(frozen=True)
class Up:
    """A `stepwell up` that runs in the background."""

    shell: Shell
    printed: str

    @property
    def gateway(self) -> str:
        return self.place("base_url").removesuffix("/v1")

    @property
    def key(self) -> str:
        """As its file has it: it is not printed."""
        return (self.shell.folder / ".stepwell" / "key").read_text()

    def place(self, name: str) -> str:
        found = re.search(rf"^  {name} +(\S+)", self.printed, re.M)
        assert found, self.printed
        return found[1]

    def call(self) -> None:
        """Runs the printed snippet unchanged."""
        self.shell.run("python", "-c", self.printed[self.printed.index("import stepwell") :].split("\n\n")[0])

    def submitted(self) -> int:
        return int(json.loads(self.shell.run("stepwell", "status", "--json"))["pool"]["submitted"])

    def pid_of(self, part: str) -> int | None:
        return next((pid for pid in self.shell.pids() if f"-m stepwell {part} " in _command_line(pid)), None)


def _command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    except OSError:
        return ""


@pytest.fixture(scope="module")
def engine() -> Iterator[FakeEngine]:
    with in_thread(FakeEngine()) as engine:
        yield engine


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Shell]:
    with fresh_shell(tmp_path) as shell:
        yield shell


@pytest.fixture(scope="module")
def flags(engine: FakeEngine, tiny_model: Path) -> list[str]:
    ports = ("--port", str(free_port()), "--dashboard-port", str(free_port()))
    return ["--engine", engine.url, "--tokenizer-path", str(tiny_model), *ports]


@pytest.fixture(scope="module")
def up(flags: list[str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    with fresh_shell(tmp_path_factory.mktemp("up")) as shell:
        yield Up(shell, shell.run("stepwell", "up", *flags, "--detach"))


def test_each_call_of_the_snippet_is_a_step_that_status_shows(up: Up) -> None:
    before = up.submitted()
    up.call()
    wait_until(lambda: up.submitted() == before + 1, "the step to be seen")
    shown = up.shell.run("stepwell", "status")
    assert f"{up.gateway} · ready" in shown
    assert re.search(r"^lost +nothing$", shown, re.M)


def test_gateway_and_dashboard_require_the_key(up: Up) -> None:
    for url in (f"{up.gateway}/pacing", f"{up.place('dashboard').split('/#')[0]}/api/status"):
        assert not answers(url)
    url = up.place("dashboard").split("/#")[0]
    assert "requires its control key" in up.shell.run("stepwell", "status", "--url", url, status=1)
    assert "pool" in up.shell.run("stepwell", "status", "--url", url, "--key", up.key)


def test_the_key_is_not_printed_but_its_file_is(up: Up) -> None:
    assert up.key not in up.printed
    assert f"in {up.shell.folder / '.stepwell' / 'key'} " in up.printed
    assert up.key not in (up.shell.folder / ".stepwell/logs/up.log").read_text()


def test_no_other_user_can_read_what_is_recorded_or_reach_rays_sockets(up: Up) -> None:
    up.call()
    state = up.shell.folder / ".stepwell"
    made = [state, *state.rglob("*")]
    assert {path.name for path in made} >= {"key", "ray_token", "env", "up.json", "data_pool.sqlite", "gateway.log"}
    assert {path.name for path in made if not path.is_symlink() and path.stat().st_mode & 0o077} == set()
    ray = (state / "ray").readlink()
    assert stat.S_IMODE(ray.stat().st_mode) == 0o700
    assert list(ray.glob("ray/session_2*/sockets/plasma_store")), "its sockets are behind that folder"


def test_auto_is_the_cluster_of_this_folder(up: Up) -> None:
    shown = up.shell.run("stepwell", "policy", "list")
    assert "stable    version 0" in shown


def test_a_shell_that_reads_the_environment_knows_the_address_and_the_key(up: Up) -> None:
    read = up.shell.run("bash", "-ec", ". .stepwell/env; printenv STEPWELL_URL STEPWELL_KEY")
    assert read.splitlines() == [up.gateway, up.key]


def test_the_key_is_on_no_command_line(up: Up) -> None:
    assert not [line for pid in up.shell.pids() if up.key in (line := _command_line(pid))]


def test_the_shards_are_as_urgent_as_the_other_processes(up: Up) -> None:
    shards = [pid for pid in up.shell.pids() if "ray::ShardActor" in _command_line(pid)]
    assert {os.getpriority(os.PRIO_PROCESS, pid) for pid in shards} == {os.getpriority(os.PRIO_PROCESS, 0)}


def test_a_second_up_in_the_same_folder_is_refused(up: Up, flags: list[str]) -> None:
    refused = up.shell.run("stepwell", "up", *flags, status=1)
    assert re.search(r"^stepwell up: it is running in this folder already \(pid \d+\)", refused, re.M)
    assert up.submitted() >= 0, "the first goes on"


@pytest.mark.parametrize("part", ["gateway", "dashboard"])
def test_a_killed_part_is_restarted_and_records_steps(up: Up, part: str) -> None:
    killed, before = up.pid_of(part), up.submitted()
    assert killed is not None
    os.kill(killed, signal.SIGKILL)
    wait_until(lambda: up.pid_of(part) not in (None, killed), f"the {part} to be started again")
    wait_until(lambda: answers(f"{up.gateway}/ready"), "the gateway to be ready")
    up.call()
    wait_until(lambda: answers(f"{up.place('dashboard').split('/#')[0]}/"), "the dashboard")
    wait_until(lambda: up.submitted() == before + 1, "the step to be seen")
    log = (up.shell.folder / ".stepwell/logs/up.log").read_text()
    assert f"the {part} ended with signal 9 (SIGKILL); starting it again" in log


def test_a_trainer_joins_from_a_shell_that_has_read_the_environment(up: Up) -> None:
    up.call()
    fetch = "from stepwell.pool.client import connect; print(len(connect('data_pool').fetch_batch(1, timeout=60)))"
    assert up.shell.run("bash", "-ec", f'. .stepwell/env; python -c "{fetch}"') == "1\n"


def test_down_leaves_no_process_and_the_next_up_keeps_key_and_journal(up: Up, flags: list[str]) -> None:
    """The last in this module: it ends what the others use."""
    up.call()
    wait_until(lambda: up.submitted() > 0, "the step to be seen")
    assert "ended" in up.shell.run("stepwell", "down")
    wait_until(lambda: not up.shell.pids(), "every process to be gone")
    assert "nothing is running" in up.shell.run("stepwell", "down")
    assert "nothing is running in this folder" in up.shell.run("stepwell", "status", status=1)
    key, ray_before = up.key, (up.shell.folder / ".stepwell/ray").readlink()
    again = up.shell.start("stepwell", "up", *flags, "--show-key")
    printed = _read_until(again, "Ctrl-C stops it")
    assert re.search(rf"^  key +{re.escape(key)}$", printed, re.M), "it was asked for, and is the same as before"
    assert not ray_before.exists(), "Ray's files of the run before are removed"
    channels = json.loads(up.shell.run("stepwell", "status", "--json"))["channels"]
    assert channels[0]["held"]["steps"] > 0, "the journal was found"
    os.killpg(again.pid, signal.SIGINT)  # as a terminal's Ctrl-C reaches all of the group
    rest, _ = again.communicate(timeout=60)
    assert again.returncode == 0, rest
    assert "ending: the gateway delivers its waiting steps" in rest
    wait_until(lambda: not up.shell.pids(), "every process to be gone")


def test_without_an_engine_it_waits_with_advice_and_can_be_stopped(shell: Shell) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    waiting = shell.start("stepwell", "up", "--engine", url)
    said = _read_until(waiting, "waiting for")
    told = f"waiting for the engine at {url}: Connection refused (tries for 300 s); if none runs, start one: "
    assert told + HOW_TO_START in said
    os.killpg(waiting.pid, signal.SIGINT)
    rest, _ = waiting.communicate(timeout=20)
    assert (waiting.returncode, "stopped before it was ready" in rest) == (130, True)
    assert not shell.pids()


def test_it_says_in_one_line_what_the_engine_lacks_and_what_that_costs(shell: Shell, engine: FakeEngine) -> None:
    taken = engine.url.rpartition(":")[2]
    with in_thread(EngineProxy(engine.url, without_tools=True)) as proxy:
        said = shell.run("stepwell", "up", "--engine", proxy.url, "--port", taken, status=1)
    (line,) = [line for line in said.splitlines() if "no tools" in line]
    assert f"{proxy.url}: no tools: the engine refuses calls with tools" in line
    assert "start vLLM with --enable-auto-tool-choice --tool-call-parser PARSER" in line
    assert "cannot listen on" in said, "it goes on all the same"


def test_in_the_background_it_reports_failures_too(shell: Shell, engine: FakeEngine) -> None:
    said = shell.run(
        "stepwell", "up", "--engine", engine.url, "--detach", "--port", engine.url[-5:].strip(":"), status=1
    )
    assert "cannot listen on" in said
    assert "with --port" in said
    wait_until(lambda: not shell.pids(), "every process to be gone")


def test_a_ray_that_is_joined_keeps_the_pool_and_reward_workers_score(
    ray_cluster: RayCluster, namespace: str, flags: list[str], tmp_path: Path
) -> None:
    (tmp_path / "mine.py").write_text(REWARD)
    (tmp_path / "stepwell.toml").write_text("[rewards]\nchildren = 1\n")
    joining = ("--ray-address", ray_cluster.address, "--ray-namespace", namespace, "--reward", "mine.py:score")
    with fresh_shell(tmp_path, **SETTINGS) as shell:
        up = Up(shell, shell.run("stepwell", "up", *flags, *joining, "--atropos", "--detach"))
        up.call()
        pool = DataPool(PoolClient("data_pool", namespace))
        (step,) = pool.fetch_batch(1, timeout=60).steps()
        assert step.reward == 0.5
        assert "atropos" in up.place("Atropos")
        shell.run("stepwell", "down")
        assert pool.stats().submitted == 1, "the pool stays"


def _read_until(process: "subprocess.Popen[str]", text: str) -> str:
    read = ""
    assert process.stdout is not None
    while text not in read:
        line = process.stdout.readline()
        assert line, read
        read += line
    return read


def test_a_version_that_no_engine_has_is_refused_and_an_old_one_is_told_and_mended_as_printed(
    shell: Shell, engine: FakeEngine, tiny_model: Path
) -> None:
    ports = ("--port", str(free_port()), "--dashboard-port", str(free_port()))
    command = ("stepwell", "up", "--engine", engine.url, "--tokenizer-path", str(tiny_model), *ports, "--detach")
    trainer = "from stepwell.pool.client import connect; connect('data_pool').set_policy_version(1{})"
    Up(shell, shell.run(*command)).call()
    assert "no engine reports version 1" in shell.run("python", "-c", trainer.format(""), status=1)
    shell.run("python", "-c", trainer.format(", check=False"))
    shell.run("stepwell", "down")
    up = Up(shell, shell.run(*command))
    why = (
        f"{engine.url}: its weights are 'default', and the pool's version is 1: it waits for a weight sync. No trainer"
    )
    assert f"everything is up, but calls fail: {why}" in up.printed
    assert f"errors    {up.gateway}: weights: {why}" in shell.run("stepwell", "status")
    mended = re.search(r"run: (stepwell policy set \d+)$", up.printed, re.M)
    assert mended, up.printed
    shell.run(*mended[1].split())
    up.call()
    assert re.search(r"^errors +none$", shell.run("stepwell", "status"), re.M)
