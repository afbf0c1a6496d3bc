"""The settings of `stepwell forget`."""

from pydantic import Field
from pydantic_settings import SettingsConfigDict

from stepwell.config.sections import Listed, PoolSection


class ForgetSettings(PoolSection):
    """Delete everything of one person, for good: from the pool, its journals, its archive and the gateways' spools.

    Nothing of that person is recorded afterwards. The command can be repeated; it goes on where it was.
    """

    model_config = SettingsConfigDict(env_prefix="STEPWELL_FORGET_")

    subject: str = Field(min_length=1)
    """The user of a session, or what the metadata of a trajectory names as its subject. Other users of this machine can
    read a command line; the environment variable STEPWELL_FORGET_SUBJECT is private."""
    archive: Listed = ()
    """Further folders of Parquet files to clean, besides the archive of the pool: exports of --shape steps, copies,
    older archives. Separated by commas."""
    receipt: str | None = None
    """File for the receipt, in JSON; without it, it is printed."""
