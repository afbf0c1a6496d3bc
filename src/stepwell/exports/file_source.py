"""Groups from files: a Parquet or JSONL file, or a folder of them, written by an export or by a pool's archive.

Invariants:
- Memory holds some rows and the longest group, whatever the size of a file.
- A reward that arrived after its trajectory was archived is stored beside the groups. Of several rewards of one
  trajectory or step, the one with the highest revision counts.
"""

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from stepwell.common.imports import require
from stepwell.errors import BadRequest
from stepwell.pool.api.watching import BY_A_PERSON
from stepwell.steps.arrow import EXTRA, read_step_groups
from stepwell.steps.columns import Columns
from stepwell.steps.groups import StepGroup
from stepwell.steps.json_lines import step_groups_from_lines
from stepwell.steps.returns import GivenReward, put_together, take_apart

if TYPE_CHECKING:
    import pyarrow

SUFFIXES = (".parquet", ".jsonl")
DATA = "data"
"""The folder of a dataset's files."""
REWARDS = "_rewards"
"""The folder of an archive's late rewards."""
REWARD_FIELDS = ("trajectory_uid", "prompt_uid", "step_index", "value", "source", "revision")


class FileSource:
    """A path, or any fsspec URL."""

    def __init__(self, url: str, *, late_rewards: bool = True) -> None:
        """Without late rewards, groups have the rewards with which they were trained."""
        self._url = url
        self._takes_late_rewards = late_rewards
        self._fs: Any
        self._fs, self._path = require("fsspec", EXTRA).core.url_to_fs(url)

    def groups(self) -> Iterator[StepGroup]:
        files = self._files()
        if not files:
            raise BadRequest(f"there is no Parquet or JSONL file in {self._url}")
        late_rewards = LateRewards(self._read_tables(f"{self._path}/{REWARDS}") if self._takes_late_rewards else ())
        for file in files:
            groups = self._read_lines(file) if file.endswith(".jsonl") else read_step_groups(self._fs, file)
            yield from map(late_rewards.apply, groups) if late_rewards else groups

    def _files(self) -> list[str]:
        if self._fs.isfile(self._path):
            return [self._path]
        return [file for folder in (self._path, f"{self._path}/{DATA}") for file in self._files_in(folder)]

    def _files_in(self, folder: str) -> list[str]:
        """The files of a folder, without its sub-folders: an archive keeps other files there."""
        found = self._fs.ls(folder, detail=False) if self._fs.isdir(folder) else []
        return sorted(file for file in found if file.endswith(SUFFIXES))

    def _read_lines(self, file: str) -> Iterator[StepGroup]:
        with self._fs.open(file, "rb") as lines:
            yield from step_groups_from_lines(lines, file)

    def _read_tables(self, folder: str) -> "Iterator[pyarrow.Table]":
        for file in self._files_in(folder):
            with self._fs.open(file, "rb") as source:
                yield require("pyarrow.parquet", EXTRA).read_table(source)


class LateRewards:
    """Rewards that arrived when their trajectory had already been shipped."""

    def __init__(self, tables: "Iterable[pyarrow.Table]") -> None:
        self._newest: dict[tuple[str, str], dict[int | None, GivenReward]] = {}
        """The newest rewards by trajectory_uid and prompt_uid; then by step_index, None for the trajectory's reward."""
        for table in tables:
            for row in zip(*(table[name].to_pylist() for name in REWARD_FIELDS), strict=True):
                self._add(*row)

    def __bool__(self) -> bool:
        return bool(self._newest)

    def apply(self, group: StepGroup) -> StepGroup:
        names = set(zip(group.columns.trajectory_uids, group.columns.prompt_uids, strict=True))
        if self._newest.keys().isdisjoint(names):
            return group
        return group.only([self._apply_to_trajectory(columns) for columns in group.trajectories()])

    def _add(self, uid: str, prompt: str, step_index: int | None, value: float, source: str, revision: int) -> None:
        rewards = self._newest.setdefault((uid, prompt), {})
        if step_index not in rewards or rewards[step_index].revision < revision:
            rewards[step_index] = GivenReward(value, source, revision)

    def _apply_to_trajectory(self, columns: Columns) -> Columns:
        late = self._newest.get((columns.trajectory_uids[0], columns.prompt_uids[0]), {})
        rewards, indexes = take_apart(columns), columns.step_indexes_S.tolist()
        for step_index, reward in sorted(late.items(), key=lambda given: given[1].revision):
            if step_index is None:
                if rewards.outcome is None or reward.revision > rewards.outcome.revision:
                    rewards.outcome = reward
                    if reward.source.startswith(BY_A_PERSON):  # it replaces all others, as in the pool
                        rewards.of_steps = [None] * len(columns)
            elif step_index in indexes:
                row = indexes.index(step_index)
                own = rewards.of_steps[row]
                if own is None or reward.revision > own.revision:
                    rewards.of_steps[row] = reward
        return put_together(columns, rewards)
