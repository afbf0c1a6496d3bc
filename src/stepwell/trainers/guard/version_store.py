"""The weights of the last versions and what the guard knows, in a folder.

    guard.json      what the guard knows (GuardState)
    version-7.pt    the state_dict of the model at version 7
    scores-7.json   what version 7 earned in validation, by task

Invariant: each file is whole or absent, at whatever moment the process dies.
"""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from stepwell.common.files import SUFFIX, replacing_file
from stepwell.errors import BadRequest
from stepwell.trainers.guard.statistics import ComparisonState, Scores
from stepwell.trainers.transfers import TensorState

if TYPE_CHECKING:
    import torch

STATE_FILE = "guard.json"
WEIGHTS = "version-"
ENDING = ".pt"
SCORES = "scores-"

Phase: TypeAlias = Literal["idle", "placing", "testing", "promoting"]
"""`placing`: the candidate's weights are on their way to the canary's engines. `testing`: they serve sessions.
`promoting`: the weights are on their way to all engines."""


@dataclass(frozen=True, slots=True)
class GuardState:
    """The part of the guard's state that outlives the process."""

    stable: int | None = None
    """The version that all sessions get, but for the canary's."""
    candidate: int | None = None
    """The version that is placed, tested or promoted."""
    newest: int | None = None
    """The newest version that passed validation and waits to become the candidate."""
    last: int = -1
    """The largest number that a version has had."""
    phase: Phase = "idle"
    reason: str = ""
    """Why the candidate is promoted."""
    engines: Sequence[str] = ()
    """The addresses of the engines of the canary."""
    began_at: float = 0.0
    """When the canary began, in seconds since 1970."""
    alarmed_at: float = 0.0
    """The age of the canary at its last alarm, in seconds."""
    test: ComparisonState = field(default_factory=ComparisonState)
    cursor: dict[str, str] | None = None
    """Where the pool's rewards that were read end."""
    restores: bool = False
    """The trainer must start again from the stable version."""
    refusals: int = 0
    """Versions in a row that did not pass validation, until now."""

    def engines_of(self, version: int, listed: Sequence[str]) -> list[str]:
        """Which of the listed engines shall have the weights of this version."""
        if self.stable is None or (self.phase == "promoting" and version == self.candidate):
            return list(listed)
        has_canary = self.phase in ("placing", "testing")
        if version == self.candidate and has_canary:
            return [engine for engine in listed if engine in self.engines]
        if version == self.stable and self.phase != "promoting":
            return [engine for engine in listed if not (has_canary and engine in self.engines)]
        return []


class VersionStore:
    def __init__(self, folder: Path) -> None:
        self._folder = folder.absolute()
        self._folder.mkdir(parents=True, exist_ok=True)
        for unfinished in self._folder.glob(f"*{SUFFIX}"):
            unfinished.unlink()

    def write_state(self, state: GuardState) -> None:
        with replacing_file(self._folder / STATE_FILE) as file:
            file.write(json.dumps(asdict(state)).encode())

    def read_state(self) -> GuardState:
        """A new one if there is none."""
        path = self._folder / STATE_FILE
        if not path.exists():
            return GuardState()
        try:
            found = json.loads(path.read_bytes())
            test = _known(ComparisonState, found.pop("test", {}))
            return GuardState(**_known(GuardState, found), test=ComparisonState(**test))
        except (ValueError, TypeError, AttributeError) as failure:
            raise BadRequest(
                f"{path} cannot be read ({failure}); bring it back, or remove it: the next start says what to do"
            ) from None

    def save(self, model: "torch.nn.Module", version: int) -> None:
        import torch

        with replacing_file(self._path(version)) as file:
            torch.save({name: value.detach().cpu() for name, value in model.state_dict().items()}, file)

    def load(self, version: int) -> TensorState:
        import torch

        if version not in self.versions():
            raise BadRequest(
                f"{self._folder} does not have the weights of version {version}; bring them back, or remove its "
                f"{STATE_FILE}: the next start says what to do"
            )
        state: TensorState = torch.load(self._path(version), map_location="cpu", weights_only=True)
        return state

    def save_scores(self, scores: Scores | None, version: int) -> None:
        if scores is None:
            return
        with replacing_file(self._scores_path(version)) as file:
            file.write(json.dumps(dict(scores)).encode())

    def scores(self, version: int) -> Scores | None:
        """The scores of a version; None if it was not validated."""
        path = self._scores_path(version)
        scores: Scores | None = json.loads(path.read_bytes()) if path.exists() else None
        return scores

    def versions(self) -> list[int]:
        names = [path.name[len(WEIGHTS) : -len(ENDING)] for path in self._folder.glob(f"{WEIGHTS}*{ENDING}")]
        return sorted(int(name) for name in names if name.isdecimal())

    def prune(self, keep: int, needed: Sequence[int]) -> None:
        """Removes all but `keep` versions: those that are needed, and the newest ones."""
        others = [version for version in self.versions() if version not in needed]
        for version in others[: max(0, len(others) + len(needed) - keep)]:
            self._path(version).unlink()
            self._scores_path(version).unlink(missing_ok=True)

    def _scores_path(self, version: int) -> Path:
        return self._folder / f"{SCORES}{version}.json"

    def _path(self, version: int) -> Path:
        return self._folder / f"{WEIGHTS}{version}{ENDING}"


@contextmanager
def borrowed(model: "torch.nn.Module", weights: TensorState) -> Iterator["torch.nn.Module"]:
    """The model with other weights, until the block ends."""
    own = {name: value.detach().clone() for name, value in model.state_dict().items()}
    try:
        model.load_state_dict(weights)
        yield model
    finally:
        model.load_state_dict(own)


def _known(cls: type, values: dict[str, Any]) -> dict[str, Any]:
    """The values without fields that another release wrote."""
    assert is_dataclass(cls)
    names = {each.name for each in fields(cls)}
    return {name: value for name, value in values.items() if name in names}
