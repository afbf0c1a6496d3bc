"""The settings of the guard."""

from dataclasses import dataclass

from stepwell.errors import BadRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparisonSettings:
    """When a canary is promoted, and when it is rolled back."""

    margin: float = 0.2
    """How much worse than the stable version a version may never be, in units of the reward. With half the margin a
    promotion needs about four times the rewards."""
    alpha: float = 0.05
    """The probability with which a version that is not worse is rolled back is at most this."""
    beta: float = 0.05
    """The probability with which a version that is worse by the margin or more is promoted is at most this."""
    reward_range: tuple[float, float] = (0.0, 1.0)
    """The least and the largest reward. Others are cut to it."""
    rewards_per_session: int | None = 1
    """How many rewards of one trajectory count; None: all. alpha and beta hold for independent rewards, and those of
    one conversation are not. With more, the test is sooner done."""

    def __post_init__(self) -> None:
        low, high = self.reward_range
        if not 0.0 < self.margin < high - low:
            raise BadRequest(f"the guard's margin is {self.margin:g}; it must be above 0 and below {high - low:g}")
        if not (0.0 < self.alpha < 1.0 and 0.0 < self.beta < 1.0):
            raise BadRequest("the guard's alpha and beta must be above 0 and below 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class GuardSettings(ComparisonSettings):
    channel: str = "train"
    """The channel whose rewards are compared."""
    canary_share: float = 0.15
    """The share of sessions that a canary serves."""
    canary_engines: int = 1
    """How many engines a canary has: the last ones of the pool's list. 0: there is no canary, and a version that passes
    validation is promoted."""
    alarm_after: float = 600.0
    """Seconds after which a canary without a decision raises an alarm, and again each time its age has doubled. It goes
    on: time decides nothing."""
    interval: float = 0.5
    """Seconds between two looks at the rewards."""
    engine_timeout: float = 20.0
    """Seconds after which a canary ends whose engines do not serve its version."""
    validation_margin: float = 0.05
    """A version whose validation is lower than the stable version's by less than this passes, however sure the loss is.
    A larger loss is refused if chance does not explain it: an equal version with a probability of at most `alpha`."""
    max_refusals: int = 3
    """So many versions in a row that do not pass validation, and the trainer starts again from the stable one."""
    keep_versions: int = 3
    """Versions whose weights are kept on disk."""

    def __post_init__(self) -> None:
        ComparisonSettings.__post_init__(self)
        if not 0.0 < self.canary_share < 1.0:
            raise BadRequest(f"canary_share is {self.canary_share:g}; it must be above 0 and below 1")
        if self.alarm_after <= 0.0:
            raise BadRequest("alarm_after must be above 0")
        if self.canary_engines < 0 or self.keep_versions < 1 or self.max_refusals < 1:
            raise BadRequest("canary_engines must be 0 or more, keep_versions and max_refusals 1 or more")
