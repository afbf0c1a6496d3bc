"""`stepwell forget`: one command for all shards and further folders, with a receipt in JSON."""

import json
from pathlib import Path

import pytest

from rig.builders import make_step
from rig.local_pool import LocalPool
from stepwell.commands.forget import forget
from stepwell.errors import BadRequest
from stepwell.pool.api.plan import PoolPlan
from stepwell.pool.api.producing import Registration
from stepwell.pool.api.sessions import SessionCall, session_prompt_uid
from stepwell.steps.arrow import ParquetWriter, step_groups_to_arrow
from stepwell.steps.columns import pack
from stepwell.steps.groups import StepGroup

ALICE, BOB = "alice@example.org", "bob@example.org"


async def pool_of_two() -> LocalPool:
    pool = LocalPool(shards=3, uid="pool")
    for n in range(6):
        for user in (ALICE, BOB):
            session = f"{user}-{n}"
            await pool.place_session(SessionCall(session, "new", user))
            await pool.submit_steps([make_step(session, session_prompt_uid(session), uid="1")])
    return pool


async def test_every_shard_forgets_and_the_receipt_says_what(tmp_path: Path) -> None:
    pool = await pool_of_two()
    receipt = await forget(pool, ALICE)
    assert ALICE not in json.dumps(receipt)
    assert sum(len(shard.get("trajectories", {})) for shard in receipt["shards"].values()) == 6
    held = {uid for shard in pool.transport.services.values() for uid in shard.pool.state.trajectories}
    assert held == {f"{BOB}-{n}" for n in range(6)}
    again = await forget(pool, ALICE)
    assert again["shards"] == receipt["shards"], "asked again, it says the same"


async def test_folders_of_exports_are_cleaned_too(tmp_path: Path) -> None:
    pool = await pool_of_two()
    steps = [
        make_step(uid, uid, uid="1", metadata={"session": {"user": user, "id": uid}})
        for uid, user in (("a", ALICE), ("b", BOB), ("c", ALICE))
    ]
    with ParquetWriter(str(tmp_path / "export")).writing("x.parquet") as write:
        write(step_groups_to_arrow([StepGroup(pack([step]), "", "train") for step in steps], 0))
    with ParquetWriter(str(tmp_path / "export")).writing("y.parquet") as write:
        write(step_groups_to_arrow([StepGroup(pack([steps[0]]), "", "train")], 0))
    receipt = await forget(pool, ALICE, [str(tmp_path / "export")])
    removed = receipt["further_archives"][str(tmp_path / "export")]
    assert {name: file["rows"] for name, file in removed.items()} == {"x.parquet": 2, "y.parquet": 1}
    assert [file.name for file in (tmp_path / "export").iterdir()] == ["x.parquet"]
    assert ALICE.encode() not in (tmp_path / "export" / "x.parquet").read_bytes()
    with pytest.raises(BadRequest, match="is not a folder"):
        await forget(pool, ALICE, [str(tmp_path / "nothing")])


async def test_a_shard_that_joins_later_takes_nothing_of_it_either() -> None:
    from stepwell.errors import Forgotten
    from stepwell.pool.shard.resharding import reshard

    pool = LocalPool(shards=1, uid="pool")
    await pool.forget(ALICE)

    async def start(plan: PoolPlan, changed: PoolPlan) -> None:
        pool.add_shards(plan, changed)

    plan = await pool.shards.plan()
    await reshard(pool.transport, plan, 3, start)
    for shard in pool.transport.services.values():
        assert shard.pool.state.tombstones.covers_user(ALICE), shard
    for n in range(6):
        with pytest.raises(Forgotten):
            await pool.register_trajectory(Registration(f"t{n}", f"p{n}", metadata={"subject": ALICE}))
