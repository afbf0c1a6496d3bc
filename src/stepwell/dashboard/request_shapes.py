"""Parameters and bodies of requests to the dashboard, validated."""

from typing import Annotated, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, FiniteFloat, model_validator

from stepwell.dashboard.index.search import Search
from stepwell.pool.api.curation import Curation, CurationAction


def _blank_is_none(value: object) -> object:
    return None if value == "" else value


BLANK = BeforeValidator(_blank_is_none)
Text = Annotated[Annotated[str, Field(max_length=1_000)] | None, BLANK]
Number = Annotated[FiniteFloat | None, BLANK]
Version = Annotated[int | None, BLANK]
Uid = Annotated[str, Field(min_length=1, max_length=1_000)]


class DashboardBody(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class TrajectoriesAsked(DashboardBody):
    """A blank filter counts as absent."""

    channel: Text = None
    state: Text = None
    cause: Text = None
    source: Text = None
    exactness: Text = None
    mark: Text = None
    reward_min: Number = None
    reward_max: Number = None
    version_min: Version = None
    """Only trajectories with a token of this policy version or a newer one."""
    version_max: Version = None
    """Only trajectories with a token of this policy version or an older one."""
    prompt_uid: Text = None
    uid: Text = None
    text: Text = None
    """A part of the conversation, in upper or lower case."""
    sort: Literal["newest", "oldest", "reward", "-reward", "tokens", "-tokens"] = "newest"
    offset: int = Field(default=0, ge=0)
    limit: int = Field(default=100, ge=1, le=1_000)

    def search(self) -> Search:
        return Search(**self.model_dump(exclude={"text"}))


class TrajectoryName(DashboardBody):
    trajectory_uid: Uid
    prompt_uid: Uid


class CurationAsked(DashboardBody):
    action: CurationAction
    trajectories: list[TrajectoryName] = Field(min_length=1, max_length=500)
    by: Annotated[str, Field(min_length=1, max_length=80)]
    why: str = Field(default="", max_length=500)
    mark: str = Field(default="", max_length=40)
    reward: FiniteFloat | None = None

    @model_validator(mode="after")
    def _check_complete(self) -> Self:
        if self.action in (CurationAction.MARK, CurationAction.UNMARK) and not self.mark.strip():
            raise ValueError(f"{self.action} needs a mark: a short word")
        if self.action is CurationAction.RELABEL and self.reward is None:
            raise ValueError("relabel needs a reward: a number")
        return self

    def curations(self) -> list[Curation]:
        return [
            Curation(
                action=self.action,
                trajectory_uid=named.trajectory_uid,
                prompt_uid=named.prompt_uid,
                by=self.by,
                why=self.why,
                mark=self.mark.strip(),
                reward=self.reward,
            )
            for named in self.trajectories
        ]
