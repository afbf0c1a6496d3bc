"""The settings of `stepwell forget`."""

from typing import Self

from pydantic import Field, model_validator
from pydantic_settings import SettingsConfigDict

from stepwell.config.sections import Duration, Listed, PoolSection


class ForgetSettings(PoolSection):
    """Delete everything of one person, or all that is too old, for good: from the pool, its journals, its archive and
    the gateways' spools.

    Nothing of that person is recorded afterwards. The command can be repeated; it goes on where it was.
    """

    model_config = SettingsConfigDict(env_prefix="STEPWELL_FORGET_")

    subject: str | None = Field(default=None, min_length=1)
    """The user of a session, or what the metadata of a trajectory names as its subject. Other users of this machine can
    read a command line; the environment variable STEPWELL_FORGET_SUBJECT is private."""
    older_than: Duration | None = None
    """In place of a subject: everything whose first call began longer ago than this, 30d for example; and what is older
    than the retention that it was opened with."""
    overdue: bool = False
    """In place of a subject: show what the pool's retention keeps though it is too old by the wall clock, because the
    pool has not run for so long since it came: the pool was off, or the clock is wrong."""
    confirm: bool = False
    """With --overdue: the clock is right. Delete it."""
    archive: Listed = ()
    """Further folders of Parquet files to clean, besides the archive of the pool: exports of --shape steps, copies,
    older archives. Separated by commas."""
    receipt: str | None = None
    """File for the receipt, in JSON; without it, it is printed."""

    @model_validator(mode="after")
    def _names_one_thing(self) -> Self:
        if (self.subject is not None) + (self.older_than is not None) + self.overdue != 1:
            raise ValueError("say either --subject or --older-than, or --overdue")
        if self.confirm and not self.overdue:
            raise ValueError("--confirm belongs to --overdue")
        return self
