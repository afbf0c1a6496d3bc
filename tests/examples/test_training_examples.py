"""The examples with environments and with an export, run as their READMEs say.

verl and Tinker start slowly. Their examples are run by the tests that start them anyway: test_training_in_verl.py and
test_tinker_service.py of tests/e2e. TRL's is run with vLLM by test_trl.py there, in the night.
"""

import asyncio
import re
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from stepwell.pool.actors import start_pool

from rig import ray_cluster as ray_settings
from rig.fake_engine import FakeEngine
from rig.gateways import serve_gateway
from rig.group_files import read_lines
from rig.local_pool import LocalPool
from rig.ray_cluster import RayCluster
from rig.shells import Shell, fresh_shell
from rig.threads import in_thread
from rig.trainers.process import DEFAULT, PROGRAMS, SETTINGS, answer_of, start_command, trainer_python
from rig.vocabulary import END_OF_TURN, encode
from stepwell.access.access_keys import AccessKeys
from stepwell.atropos.app import create_atropos
from stepwell.pool.api.plan import PoolPlan
from stepwell.pool.api.producing import Registration
from stepwell.pool.client import PoolClient
from tests.examples.folders import EXAMPLES, shell_block
from tests.unit.trainers.models import one_turn
from tests.unit.trainers.scripted_engine import ScriptedEngine, serve

KEY = "control-key-of-the-tests"
BATCH = re.compile(r"step \d: 2 groups, mean score 0\.\d\d, \d+ trained tokens")
REPLIES = ("a quiet shore", "A Train", "12 LOAVES", "snow, ice & wind") * 100
QUESTIONS = 6
WITHIN = 300.0
ON_CPU = "--use_cpu true --bf16 false --report_to none"
UPDATES, SAMPLES = 2, 4


@asynccontextmanager
async def gateway() -> AsyncIterator[str]:
    """What `stepwell up --atropos` serves, with an engine whose answers differ."""
    pool = LocalPool()
    atropos = create_atropos(pool=pool, keys=AccessKeys([KEY]), state=None)
    async with (
        FakeEngine(replies=REPLIES) as engine,
        serve_gateway(pool, [engine.url], control_keys=[KEY], atropos=atropos) as url,
    ):
        yield url


@pytest.fixture(scope="module")
def shell(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shell]:
    """Where `stepwell up` was typed, after `. .stepwell/env`. One example after the other uses it."""
    folder = tmp_path_factory.mktemp("user")
    (folder / "examples").symlink_to(EXAMPLES)
    with (
        in_thread(gateway()) as url,
        fresh_shell(folder, STEPWELL_URL=url, STEPWELL_KEY=KEY, MODEL=str(tiny_model)) as shell,
    ):
        yield shell


def with_env(shell: Shell, **env: str) -> Shell:
    return Shell(shell.folder, {**shell.env, **env})


def steps_taken(printed: str) -> list[str]:
    return [line for line in printed.splitlines() if BATCH.fullmatch(line)]


def test_base_env_makes_groups_and_serves_a_trainer(shell: Shell) -> None:
    shell.run("bash", "-ec", shell_block("base_env", "process"))
    groups = list(read_lines(shell.folder / "groups" / "groups.jsonl"))
    assert [len(group["scores"]) for group in groups] == [4] * 3
    assert [group["exactness"] for group in groups] == [["engine"] * 4] * 3
    printed = shell.run("bash", "-ec", shell_block("base_env", "serve"))
    assert len(steps_taken(printed)) == 3, printed
    assert "HTTP Request" not in printed, "a line for each call hides what one wants to see"


def test_atropos_environment_runs_without_atroposlib_and_serves_its_trainer(shell: Shell) -> None:
    printed = shell.run("bash", "-ec", shell_block("atropos_environment", "serve"))
    assert len(steps_taken(printed)) == 3, printed


async def fill(pool: PoolClient) -> None:
    """Sums, each with a right and a wrong answer."""
    for number in range(QUESTIONS):
        asked = f"{number} + 2 ="
        for wrong in range(2):
            uid = f"{number}-{wrong}"
            await pool.register_trajectory(Registration(uid, asked, group_size=2))
            answer = [*encode(str(number + 2 + 3 * wrong)), END_OF_TURN]
            await pool.submit_steps([one_turn(uid, asked, encode(asked), answer)])
            await pool.complete_trajectory(uid, asked, float(not wrong))


def test_export_and_sft_tunes_a_model_on_the_right_answers(shell: Shell, ray_cluster: RayCluster) -> None:
    joining = {**ray_settings.SETTINGS, "RAY_ADDRESS": ray_cluster.address}
    with ray_cluster.namespace(DEFAULT) as namespace:
        start_pool(PoolPlan(), namespace)
        asyncio.run(fill(PoolClient("data_pool", namespace)))
        shown = with_env(shell, **joining).run("bash", "-ec", shell_block("export_and_sft", "stepwell export"))
    assert f"wrote sft.parquet: {QUESTIONS} rows of {QUESTIONS} trajectories" in shown

    path = f"{trainer_python('trl').parent}:{shell.env['PATH']}"
    command = shell_block("export_and_sft", "sft.py").strip()
    shown = with_env(shell, **SETTINGS, PATH=path).run("bash", "-ec", f"{command} {ON_CPU}", timeout=WITHIN)
    (first, last) = map(float, re.findall(rf"{QUESTIONS} examples: loss (\d.\d+) at first, (\d.\d+) at last", shown)[0])
    assert last < first / 2
    assert (shell.folder / "tuned" / "model.safetensors").exists()


def test_trl_trains_and_brings_its_weights_to_the_engine(
    ray_cluster: RayCluster, tiny_model: Path, tmp_path: Path
) -> None:
    flags = (
        *f"--max_steps {UPDATES} --per_device_train_batch_size {SAMPLES} --logging_steps 1".split(),
        *f"--save_strategy no --token_budget 0 {ON_CPU}".split(),
    )
    command = ["python", PROGRAMS / "with_trl.py", "--model", tiny_model, "--output_dir", "run", *flags]
    with ray_cluster.namespace(DEFAULT) as namespace, serve(ScriptedEngine()) as engine:
        start_pool(PoolPlan(), namespace)
        client = PoolClient("data_pool", namespace)
        asyncio.run(client.change_engines(add=(engine.url,)))
        asyncio.run(fill(client))
        started = start_command("trl", command, address=ray_cluster.address, log=tmp_path / "trl.log")
        answer = answer_of(started, tmp_path / "trl.log", timeout=WITHIN)
    assert answer["updates"] == UPDATES
    assert set(answer["rewards"]) == {0.5}
    assert answer["missing"] == [], "TRL asks for what our classes do not have"
    assert engine.weight_version == str(UPDATES + 1), "once at the start, then every update"
    assert (tmp_path / "run" / "trained" / "model.safetensors").exists()
