"""NeMo Gym's capture of training tokens with the pool as its transport: what Gym's model servers record become steps.

    token_id_capture:
      sink: stepwell.nemo_gym:PoolTokenSink
      lineage_store: stepwell.nemo_gym:PoolLineage

- A rollout of Gym is a trajectory, a model call of it a step. `lineage` has Gym's digests of the conversation, and
  `extras` the rest of Gym's record, so that a record is read back as it was written.
- A call is noted in the trajectory's metadata before it is made. A rollout is incomplete if a call was noted and not
  recorded, or was reported as lost. An incomplete rollout reaches no trainer.
- Gym does not tell which weights answered a call. A step has the pool's policy version when its call began, and its
  extras say that the engine's own is unknown.
- A snapshot is what the pool has at the moment. Its version grows with every record and every note.
- Gym is imported on use.
"""

import hashlib
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from stepwell.errors import BadRequest, Conflict
from stepwell.pool.api.producing import TRAIN, EndResult, RecordedTurn, Registration, SubmitVerdict, TrajectoryRef
from stepwell.pool.client import PoolClient
from stepwell.pool.client.ray_cluster import AUTO, join_ray
from stepwell.steps.columns import unpack
from stepwell.steps.step import JsonObject, Step, ids_array, logprobs_array
from stepwell.steps.trainable import step_fault

if TYPE_CHECKING:
    from nemo_gym.token_id_capture.protocols import LineageResolution, TokenCaptureSnapshot
    from nemo_gym.token_id_capture.records import TokenEntry

RECORD = "nemo_gym"
"""The key in a step's extras of Gym's record without its tokens."""
BEGUN, LOST = "nemo_gym_begun/", "nemo_gym_lost/"
"""The prefixes, in a trajectory's metadata, of the id of a model call: it was to be made; it was not recorded."""
PROMPT, RESPONSE, LOGPROBS = "prompt_token_ids", "generation_token_ids", "generation_log_probs"
OLDEST = 0
"""The policy version of a call whose begin this process has not seen: no weights are older."""
OF_A_TASK = re.compile(r"(?P<task>.+)-\d+(-a\d+)?")
"""How Gym names the rollouts of a task: TASK-ROLLOUT, and TASK-ROLLOUT-aATTEMPT if it is repeated."""


class PoolCapture:
    """The common part of sink, source and lineage. They must name the same pool and the same `run`.

    `run` keeps the rollouts of several runs apart: Gym numbers tasks and rollouts from 0 in each of them.
    """

    def __init__(
        self,
        *,
        pool: str | PoolClient = "data_pool",
        run: str = "",
        address: str = AUTO,
        namespace: str = "default",
    ) -> None:
        if isinstance(pool, str):
            join_ray(address, namespace)
            pool = PoolClient(pool, namespace)
        self._pool = pool
        self._prefix = f"{run}." if run else ""

    async def close(self) -> None:
        """Nothing is held: every call returns when the pool has what it was given."""

    def _ref(self, rollout_id: str) -> TrajectoryRef:
        task = OF_A_TASK.fullmatch(rollout_id)
        return TrajectoryRef(f"{self._prefix}{rollout_id}", f"{self._prefix}{task['task'] if task else rollout_id}")

    async def _steps(self, rollout_id: str) -> list[Step]:
        ref = self._ref(rollout_id)
        return unpack(await self._pool.read([(ref.trajectory_uid, ref.prompt_uid)]), copy=False)


class PoolTokenSink(PoolCapture):
    """Gym's TokenSink: each record becomes a step of the pool, durable and visible to all when `put` returns.

    The rollouts of a task are a group of `group_size`; a rollout whose id names no task is a group of its own.
    `temperature` is that at which Gym's agents sample. Its records do not tell it, and trainers leave out steps of an
    unknown one.
    """

    def __init__(
        self,
        *,
        pool: str | PoolClient = "data_pool",
        run: str = "",
        address: str = AUTO,
        namespace: str = "default",
        channel: str = TRAIN,
        group_size: int | None = None,
        temperature: float | None = None,
    ) -> None:
        super().__init__(pool=pool, run=run, address=address, namespace=namespace)
        self._channel = channel
        self._group_size = group_size
        self._temperature = temperature
        self._begun_at: dict[tuple[str, str], int] = {}
        """The policy version when a call began, by rollout and call."""

    async def begin_call(self, rollout_id: str, model_call_id: str) -> None:
        """Gym calls it before the model is asked. If it fails, so does the model call."""
        version = (await self._pool.newest_serving()).policy_version
        await self._note(rollout_id, BEGUN + model_call_id)
        self._begun_at[rollout_id, model_call_id] = version

    async def put(self, entry: "TokenEntry") -> None:
        """The same record again changes nothing; another one of the same call is a Conflict."""
        if entry.prompt_is_delta:
            raise BadRequest("set token_id_capture.delta_records to false: the pool stores what prompts share once")
        version = self._begun_at.pop((entry.rollout_id, entry.model_call_id), OLDEST)
        step = step_of(entry, self._ref(entry.rollout_id), version, self._temperature)
        if (fault := step_fault(step)) is not None:
            raise BadRequest(f"model call {entry.model_call_id} cannot be trained: {fault}")
        size = self._size_for(entry.rollout_id)
        (verdict,) = await self._pool.submit_steps([step], channel=self._channel, group_size=size)
        if verdict is SubmitVerdict.DUPLICATE:
            await self._check_same(entry)
        elif verdict is not SubmitVerdict.ACCEPTED:
            raise Conflict(f"the pool did not take model call {entry.model_call_id}: {verdict}")

    async def mark_incomplete(self, rollout_id: str, model_call_id: str = "") -> None:
        """A call of the rollout was not recorded. A rollout that is complete, and not handed out yet, leaves the
        pool."""
        self._begun_at.pop((rollout_id, model_call_id), None)
        await self._note(rollout_id, LOST + model_call_id)
        ref = self._ref(rollout_id)
        if await self._pool.channel_if_open(ref.trajectory_uid, ref.prompt_uid) is None:
            await self._pool.abort_trajectory(ref.trajectory_uid, ref.prompt_uid)

    async def _note(self, rollout_id: str, note: str) -> None:
        ref, size = self._ref(rollout_id), self._size_for(rollout_id)
        registration = Registration(ref.trajectory_uid, ref.prompt_uid, self._channel, size, {note: True})
        await self._pool.register_trajectory(registration)

    async def _check_same(self, entry: "TokenEntry") -> None:
        found = {step.uid: step for step in await self._steps(entry.rollout_id)}.get(entry.model_call_id)
        if found is None or entry_of(found).model_dump() != entry.model_dump():
            raise Conflict(f"model call {entry.model_call_id} of rollout {entry.rollout_id} has another record already")

    def _size_for(self, rollout_id: str) -> int | None:
        return self._group_size if OF_A_TASK.fullmatch(rollout_id) else 1


class PoolTokenSource(PoolCapture):
    """Gym's TokenSource. `complete` gives a finished rollout to the trainers of the pool; `drop` takes it out of it."""

    async def freeze(self, rollout_id: str) -> "TokenCaptureSnapshot":
        """The steps of the rollout that the pool has. Later calls are still taken, and change the version."""
        from nemo_gym.token_id_capture.protocols import TokenCaptureSnapshot

        steps = await self._steps(rollout_id)
        recorded, notes = {step.uid for step in steps}, notes_of(steps)
        unrecorded = {note.removeprefix(BEGUN) for note in notes if note.startswith(BEGUN)} - recorded
        return TokenCaptureSnapshot(
            rollout_id=rollout_id,
            entries=tuple(map(entry_of, steps)),
            incomplete=not steps or bool(unrecorded) or any(note.startswith(LOST) for note in notes),
            snapshot_id=hashlib.sha256("\n".join([rollout_id, *sorted(recorded), *notes]).encode()).hexdigest(),
            version=len(steps) + len(notes),
        )

    async def drop(self, rollout_id: str, *, snapshot_id: str, version: int) -> bool:
        """Take the rollout out of the pool, if it is as it was in that snapshot. It is not trained from there.

        A record that comes between this check and the removal is removed too. Gym names every attempt anew for this.
        """
        now = await self.freeze(rollout_id)
        if not now.entries or (now.snapshot_id, now.version) != (snapshot_id, version):
            return False
        return await self.abort(rollout_id) is EndResult.ABORTED

    async def complete(self, rollout_id: str, reward: float | None) -> EndResult:
        """The rollout is over, and is trained with this reward. If it is incomplete, it is aborted instead."""
        if (await self.freeze(rollout_id)).incomplete:
            return await self.abort(rollout_id)
        ref = self._ref(rollout_id)
        return await self._pool.complete_trajectory(ref.trajectory_uid, ref.prompt_uid, reward)

    async def abort(self, rollout_id: str) -> EndResult:
        """The rollout leaves the pool, and another attempt can take its place in the group."""
        ref = self._ref(rollout_id)
        return await self._pool.abort_trajectory(ref.trajectory_uid, ref.prompt_uid)


class PoolLineage(PoolCapture):
    """Gym's LineageResolver: the pool finds the steps that a request may continue, and Gym's own matcher decides."""

    async def resolve(self, rollout_id: str, request_items: list[dict[str, Any]]) -> "LineageResolution":
        from nemo_gym.token_id_capture.fingerprint import assistant_fingerprint
        from nemo_gym.token_id_capture.lineage import RolloutLineage

        candidates, replied, ref = RolloutLineage(), assistant_fingerprint(request_items), self._ref(rollout_id)
        if replied:
            for turn in await self._pool.turns(ref.trajectory_uid, ref.prompt_uid, replied):
                candidates.add_entry(candidate_of(turn, rollout_id))
        return candidates.resolve(request_items)

    def is_process_shared(self) -> bool:
        return True


def step_of(entry: "TokenEntry", ref: TrajectoryRef, policy_version: int, temperature: float | None) -> Step:
    logprobs = logprobs_array(entry.generation_log_probs)
    rebuilt = {PROMPT, RESPONSE} | ({LOGPROBS} if logprobs.tolist() == entry.generation_log_probs else set())
    return Step(
        prompt_ids=ids_array(entry.prompt_token_ids),
        response_ids=ids_array(entry.generation_token_ids),
        response_logprobs=logprobs,
        trajectory_uid=ref.trajectory_uid,
        prompt_uid=ref.prompt_uid,
        uid=entry.model_call_id,
        policy_version=policy_version,
        temperature=temperature,
        model=entry.model,
        started_at=entry.created_at,
        extras={"version": "unknown", RECORD: entry.model_dump(mode="json", exclude=rebuilt)},
        lineage=lineage_of(entry),
    )


def entry_of(step: Step) -> "TokenEntry":
    """Gym's record of the step, as it was put."""
    from nemo_gym.token_id_capture.records import TokenEntry

    logprobs = step.response_logprobs
    tokens = {
        PROMPT: step.prompt_ids.tolist(),
        RESPONSE: step.response_ids.tolist(),
        LOGPROBS: [] if logprobs is None else logprobs.tolist(),
    }
    record = step.extras[RECORD]
    assert isinstance(record, Mapping)
    return TokenEntry.model_validate({**tokens, **record})


def lineage_of(entry: "TokenEntry") -> JsonObject:
    """The lineage by which a later call finds this one; empty if Gym has not stamped the record."""
    if not entry.continuation_fingerprint:
        return {}
    return {
        "replied": entry.continuation_fingerprint,
        "continuation_context_len": entry.continuation_context_len,
        "continuation_context_digest": entry.continuation_context_digest,
        "fingerprint_version": entry.fingerprint_version,
        "digest": entry.digest,
    }


def candidate_of(turn: RecordedTurn, rollout_id: str) -> "TokenEntry":
    """A record that Gym's matcher compares with a request. What the call sampled does not matter for that, so all its
    tokens are in the prompt."""
    from nemo_gym.token_id_capture.records import TokenEntry

    stored = dict(turn.lineage)
    fingerprint = stored.pop("replied")
    tokens = {PROMPT: turn.tokens.tolist(), RESPONSE: [], LOGPROBS: [], "cum_len": len(turn.tokens)}
    names = {"rollout_id": rollout_id, "model_call_id": turn.uid, "continuation_fingerprint": fingerprint}
    return TokenEntry.model_validate({**stored, **tokens, **names})


def notes_of(steps: Sequence[Step]) -> list[str]:
    """The notes about its calls in the metadata of their trajectory."""
    return sorted(name for name in (steps[0].metadata if steps else ()) if name.startswith((BEGUN, LOST)))
