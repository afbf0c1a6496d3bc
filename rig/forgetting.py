"""A shard with data of two people in every place where a shard has data, in a process that can be killed.

    python -m rig.forgetting JOURNAL ARCHIVE [STEP [SECONDS]]

fills it, forgets ALICE, or what is older than that, and kills itself before the named step.
"""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType

import numpy as np
from stepwell.pool.shard.journal_store import JournalIdentity
from stepwell.pool.slices.producing import AddSteps, Complete, GiveReward, PlaceSession

from rig.asked import asked
from rig.builders import make_step
from stepwell.pool.api.leasing import BatchRequest
from stepwell.pool.api.plan import Limits, PoolPlan
from stepwell.pool.api.producing import RewardGiven, SubmitVerdict
from stepwell.pool.api.sessions import SessionCall, session_prompt_uid
from stepwell.pool.shard.archive import ParquetArchive
from stepwell.pool.shard.journal import ShardJournal
from stepwell.pool.shard.placement import journal_backend
from stepwell.pool.shard.service import ShardService
from stepwell.pool.slices.curation import Curate, Curation, CurationAction
from stepwell.pool.slices.forgetting import Forget, ForgetOverdue
from stepwell.pool.slices.forgetting_work import Forgetting
from stepwell.steps.columns import pack
from stepwell.steps.step import Json, Step

ALICE, BOB = "alice.liddell@example.org", "bob.dodgson@example.org"
SECRETS = {ALICE: "the-white-rabbit-is-late", BOB: "the-hatter-pours-some-tea"}
FIRST_TOKEN = {ALICE: 7_100_000, BOB: 9_300_000}
PLAN = PoolPlan(uid="5f0c", limits=Limits(history_size=2), min_free_bytes=0)
ARCHIVED, IN_FILE_TOO, WAITING, HISTORY, LEASED, OPEN, READY = (
    "archived",
    "second",
    "waiting",
    "history",
    "leased",
    "open",
    "ready",
)
PLACES = (ARCHIVED, IN_FILE_TOO, WAITING, HISTORY, LEASED, OPEN, READY)
LEASE, DAY = 600.0, 86_400.0


def session_of(user: str, place: str) -> str:
    return f"{user.partition('.')[0]}-{place}"


def tokens_of(user: str, place: str) -> list[int]:
    first = FIRST_TOKEN[user] + 1000 * PLACES.index(place)
    return list(range(first, first + 40))


def open_journal(journal: str) -> ShardJournal:
    identity = JournalIdentity(pool=PLAN.name, pool_uid=PLAN.uid, shards=1, index=0)
    return journal_backend(journal).open(journal, PLAN.name, identity, closed_kept=100)


def open_shard(
    journal: ShardJournal,
    archive: str,
    plan: PoolPlan = PLAN,
    clock: Callable[[], float] = time.time,
    monotonic: Callable[[], float] = time.monotonic,
) -> tuple[ShardService, ParquetArchive]:
    files = ParquetArchive(archive, PLAN.name, journal)
    return ShardService(plan, PLAN.name, journal=journal, archive=files, clock=clock, monotonic=monotonic), files


def step_of(user: str, place: str, uid: str = "1", **fields: object) -> Step:
    session = session_of(user, place)
    tokens = tokens_of(user, place)
    texts = {"extras": {"text": SECRETS[user]}, "metadata": {"note": SECRETS[user]}}
    ids = {"prompt_ids": tokens[:30], "response_ids": tokens[30:]}
    return make_step(session, session_prompt_uid(session), uid=uid, **ids, **texts | fields)


class Conversations:
    """Sessions of both people, of calls that began so many days ago."""

    def __init__(
        self,
        shard: ShardService,
        days_ago: Mapping[str, float] = MappingProxyType({}),
        metadata: Mapping[str, Mapping[str, Json]] = MappingProxyType({}),
    ) -> None:
        """By user: when the calls began, and metadata of the sessions."""
        self.shard = shard
        self._days_ago = days_ago
        self._metadata = metadata

    async def begin(self, user: str, place: str) -> None:
        metadata = {"said": SECRETS[user], **self._metadata.get(user, {})}
        (answer,) = await self.shard.run(
            [PlaceSession(SessionCall(session_of(user, place), "new", user, metadata=metadata))]
        )
        assert not isinstance(answer, Exception), answer
        began = time.time() - DAY * self._days_ago[user] if user in self._days_ago else 0.0
        broken = step_of(user, place, "2", quarantine=f"broken: {SECRETS[user]}", started_at=began)
        verdicts = await asked(self.shard, AddSteps(pack([step_of(user, place, started_at=began), broken])))
        assert verdicts == [SubmitVerdict.ACCEPTED, SubmitVerdict.QUARANTINED]

    async def complete(self, user: str, place: str) -> None:
        await self.begin(user, place)
        session = session_of(user, place)
        await self.shard.run([Complete(session, session_prompt_uid(session), 1.0)])

    async def train(self, *places: str) -> None:
        """In one batch."""
        for place in places:
            for user in (ALICE, BOB):
                await self.complete(user, place)
        lease = f"lease of {places}"
        assert await self.shard.take(BatchRequest(count=2 * len(places), channel="train"), LEASE, lease) is not None
        await self.shard.ack(lease)


async def comment(shard: ShardService, user: str, place: str) -> None:
    """A late reward, and a person's decision."""
    session, text = session_of(user, place), SECRETS[user]
    prompt = session_prompt_uid(session)
    late = RewardGiven(trajectory_uid=session, prompt_uid=prompt, value=0.5, source="thumb", notes=text)
    assert await asked(shard, GiveReward(late))
    rejected = CurationAction.REJECT
    await asked(shard, Curate(Curation(action=rejected, trajectory_uid=session, prompt_uid=prompt, by="eve", why=text)))


async def fill(
    shard: ShardService,
    archive: ParquetArchive,
    days_ago: Mapping[str, float] = MappingProxyType({}),
    metadata: Mapping[str, Mapping[str, Json]] = MappingProxyType({}),
) -> None:
    """The mappings are those of Conversations."""
    people = Conversations(shard, days_ago, metadata)
    await people.train(ARCHIVED, IN_FILE_TOO)
    for user in (ALICE, BOB):
        await comment(shard, user, ARCHIVED)
    shard.pool.state.retire_history()
    archive.flush()
    for user in (ALICE, BOB):
        await comment(shard, user, IN_FILE_TOO)
    await people.train(WAITING)
    await people.train(HISTORY)
    for user in (ALICE, BOB):
        await people.complete(user, LEASED)
    assert await shard.take(BatchRequest(count=2, channel="train"), LEASE, "held") is not None
    for user in (ALICE, BOB):
        await people.begin(user, OPEN)
        await people.complete(user, READY)


def needles(user: str) -> dict[str, bytes]:
    """What must not be found: texts, and tokens in every width and in JSON."""
    found = {user: user.encode(), SECRETS[user]: SECRETS[user].encode()}
    found |= {session: session.encode() for session in (session_of(user, place) for place in PLACES)}
    for place in PLACES:
        some = tokens_of(user, place)[5:9]
        found |= {f"{place} as {width}": np.array(some, width).tobytes() for width in ("<i4", "<i8", ">i4")}
        found[f"{place} as text"] = ",".join(map(str, some)).encode()
    return found


def traces(user: str, *folders: Path) -> set[str]:
    """In the raw bytes of all files, and in what Parquet files say when they are unpacked."""
    import pyarrow.parquet as pq

    found: set[str] = set()
    for file in (file for folder in folders for file in folder.rglob("*") if file.is_file()):
        content = file.read_bytes()
        if file.suffix in (".parquet", ".part"):
            table = pq.read_table(file)
            content += b"".join(
                ",".join(map(str, column.to_pylist())).replace(", ", ",").encode() for column in table.columns
            )
            content += str(pq.read_metadata(file).to_dict()).encode()
        found |= {f"{file.name}: {what}" for what, bytes_ in needles(user).items() if bytes_ in content}
    return found


def run_killed(journal: str, archive: Path, step: str, older_than: float | None = None) -> int:
    """Fill and forget in a process of its own. Returns how it ended."""
    seconds = [] if older_than is None else [str(older_than)]
    line = [sys.executable, "-m", "rig.forgetting", journal, str(archive), step, *seconds]
    done = subprocess.run(line, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode in (0, -signal.SIGKILL), done.stderr
    return done.returncode


async def main(journal: str, archive: str, step: str = "", seconds: str = "") -> None:
    shard, files = open_shard(open_journal(journal), archive)

    def kill_before(name: str) -> None:
        if name == step:
            os.kill(os.getpid(), signal.SIGKILL)

    await fill(shard, files, days_ago={ALICE: 40, BOB: 20} if seconds else {})
    shard.pool.state.slice_of(Forgetting).before_step = kill_before
    await (shard.run_long(ForgetOverdue(float(seconds))) if seconds else shard.run_long(Forget(ALICE)))


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
