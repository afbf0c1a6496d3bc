"""The settings of `stepwell policy list`, `set`, `promote` and `rollback`."""

from typing import Annotated

from pydantic import Field
from pydantic_settings import CliPositionalArg, SettingsConfigDict

from stepwell.config.sections import PoolSection


class PolicyListSettings(PoolSection):
    """Show which version of the policy serves which sessions, what the versions earned, and the last decisions."""

    model_config = SettingsConfigDict(env_prefix="STEPWELL_POLICY_")

    channel: str = "train"
    """Channel whose rewards are shown."""
    last: int = Field(default=10, ge=0)
    """How many decisions to show."""
    as_json: bool = Field(default=False, alias="json")
    """Print it as JSON."""


class PolicySetSettings(PoolSection):
    """Set the version of the policy to one that an engine reports; 0 are the weights that engines were started with. A
    WeightSync sets versions by itself: this command is for a pool whose version no engine has, as after a restart of
    the engines without the trainer. Others are refused.
    """

    model_config = SettingsConfigDict(env_prefix="STEPWELL_POLICY_")

    version: CliPositionalArg[Annotated[int, Field(ge=0)]]
    """The version that sessions get from now on."""


class PolicyDecisionSection(PoolSection):
    reason: str = "an operator's decision"
    """Why, in words. It is kept with the decision."""
    by: str = ""
    """Who decides; by default the name of this user."""


class PromoteSettings(PolicyDecisionSection):
    """Give the canary to all sessions at once, without waiting for the guard. Its engines serve them from now on; the
    guard brings the version to the other engines when the trainer runs. The trainer need not run for this command.
    """

    model_config = SettingsConfigDict(env_prefix="STEPWELL_POLICY_")

    version: int | None = Field(default=None, ge=0)
    """The version of a trainer whose guard has lost its folder: it may begin with it, at all engines. Without it, the
    canary is promoted."""


class RollbackSettings(PolicyDecisionSection):
    """End the canary at once. All sessions go to the other engines, its engines get no calls until they have other
    weights, and what it said is not trained. The trainer need not run for this command.
    """

    model_config = SettingsConfigDict(env_prefix="STEPWELL_POLICY_")
