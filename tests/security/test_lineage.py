"""What a version of the policy was trained on can be told, and proven, from the archive; also what is forgotten."""

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from stepwell.pool.slices.producing import AddSteps, Complete, Register

from rig import forgetting as rig
from rig.asked import asked
from rig.builders import make_step
from rig.forgetting import ALICE, BOB
from stepwell.cli import main
from stepwell.exports.lineage import ArchivedLineage, digest_of
from stepwell.pool.api.leasing import BatchRequest
from stepwell.pool.api.producing import Registration
from stepwell.pool.shard.service import ShardService
from stepwell.pool.slices.forgetting import Forget
from stepwell.steps.columns import pack
from stepwell.steps.groups import batch_digest, lineage_name, trajectory_digests
from stepwell.steps.step import Exactness, logprobs_array
from tests.security.test_forgotten_bytes import opened


async def roll_out(shard: ShardService, prompt: str, rewards: list[float]) -> None:
    for n, reward in enumerate(rewards):
        uid = f"{prompt}-{n}"
        await shard.run([Register(Registration(uid, prompt, group_size=len(rewards)))])
        steps = [
            make_step(
                uid,
                prompt,
                uid=f"{uid}.{turn}",
                prompt_ids=range(5 * turn + 1),
                response_ids=[n, 7, 8],
                response_logprobs=logprobs_array([-0.1 * turn, -0.25, -1e-7]),
                response_mask=np.array([True, turn % 2 == 0, True]),
                exactness=Exactness.RETOKENIZED if turn == 2 else Exactness.ENGINE,
                started_at=float(turn),
            )
            for turn in range(3)
        ]
        await asked(shard, AddSteps(pack(steps)))
        await shard.run([Complete(uid, prompt, reward)])


async def train(shard: ShardService, batch: str, count: int = 1) -> str:
    """Returns the hash of what the trainer got."""
    leased = await shard.take(BatchRequest(count=count, channel="train", min_exactness=Exactness.ENGINE), 60.0, batch)
    assert leased is not None
    await shard.ack(batch)
    return batch_digest(trajectory_digests(leased.columns).values())


async def test_a_version_is_told_by_its_batches_and_they_are_rebuilt_bit_for_bit(tmp_path: Path) -> None:
    archive = tmp_path / "archive"
    with opened(str(tmp_path / "state"), archive) as (shard, files):
        await shard.set_policy_version(40)
        for prompt, rewards in (("p", [1.0, 0.0]), ("q", [1.0, 1.0]), ("r", [0.0, 3.0])):
            await roll_out(shard, prompt, rewards)
        hashes = {"first": await train(shard, "first"), "second": await train(shard, "second")}
        await shard.set_policy_version(42)
        hashes["third"] = await train(shard, "third")
        shard.pool.state.retire_history()
        await shard.stats()
        files.flush()
    lineage = ArchivedLineage(str(archive))
    assert lineage.versions == [40, 42]
    assert {entry.batch for entry in lineage.of_version(42)} == {"first", "second"}
    assert {entry.batch for entry in lineage.of_version(43)} == {"third"}, "not served yet"
    best, worst = (lineage.of_trajectory(f"p-{n}") for n in range(2))
    assert [(one.version, one.batch, one.rows, one.tokens) for one in best] == [(42, "first", 2, 6)]
    assert best[0].advantage == -worst[0].advantage > 0.7
    assert {batch: lineage.recorded_digest(batch) for batch in hashes} == hashes
    assert {batch: digest_of(lineage.rebuild(batch)) for batch in hashes} == hashes


async def test_the_command_shows_and_proves_it_and_notices_another_archive(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    archive = tmp_path / "archive"
    with opened(str(tmp_path / "state"), archive) as (shard, files):
        await roll_out(shard, "p", [1.0, 0.0])
        await train(shard, "b")
        shard.pool.state.retire_history()
        await shard.stats()
        files.flush()
    line = ["lineage", "--archive", str(archive), "--verify"]
    main([*line, "--version", "1"])
    shown = capsys.readouterr().out
    assert "version 1 · batch b · 2 trajectories, 4 rows, 12 tokens" in shown
    assert "batch b is rebuilt from the archive bit for bit" in shown
    main([*line[:3], "--json", "--trajectory", "p-0"])
    (entry,) = json.loads(capsys.readouterr().out)
    assert (entry["trajectory"], entry["version"]) == (lineage_name("p-0"), 1)
    (file,) = archive.glob("*.parquet")
    table = pq.read_table(file)
    doubled = pa.array([[2 * x for x in row] for row in table["response_logprobs"].to_pylist()], pa.list_(pa.float32()))
    pq.write_table(table.set_column(table.column_names.index("response_logprobs"), "response_logprobs", doubled), file)
    with pytest.raises(SystemExit):
        main([*line, "--version", "1"])
    assert "and what was trained has" in capsys.readouterr().err


async def test_the_receipt_of_a_forgotten_subject_names_the_versions_that_were_trained_on_it(tmp_path: Path) -> None:
    archive = tmp_path / "archive"
    with opened(str(tmp_path / "state"), archive) as (shard, files):
        await shard.set_policy_version(6)
        await rig.Conversations(shard).train("archived")
        await shard.set_policy_version(9)
        await rig.Conversations(shard).train("second")
        shard.pool.state.retire_history()
        await shard.stats()
        files.flush()
        await rig.Conversations(shard).begin(ALICE, "open")
        receipt = await shard.run_long(Forget(ALICE))
        assert receipt.removed["versions"] == [9, 10]
        assert rig.traces(ALICE, tmp_path) == set()
        untouched = await shard.run_long(Forget("somebody else"))
        assert untouched.removed == {}
    lineage = ArchivedLineage(str(archive))
    assert len(lineage.of_version(9)) == 2, "the lineage has no names, and stays"
    assert [entry.version for entry in lineage.of_trajectory(rig.session_of(BOB, "second"))] == [10]
