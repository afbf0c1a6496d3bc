"""The settings of `stepwell envs run`."""

from typing import Literal

from pydantic import Field
from pydantic_settings import CliPositionalArg, SettingsConfigDict

from stepwell.config.sections import GROUP_SIZE, Listed, Section


class EnvsRunSettings(Section):
    """Make rollouts of tasks that were written for verifiers or Harbor. Each is a trajectory with the reward that the
    framework gives it; the rollouts of one task are a group.

    The framework runs in a process of its own.
    """

    model_config = SettingsConfigDict(env_prefix="STEPWELL_ENVS_")

    framework: CliPositionalArg[Literal["verifiers", "harbor"]]
    """Whose tasks they are."""
    tasks: CliPositionalArg[str]
    """verifiers: the id of a taskset. Harbor: the folder of a task, or a folder of such folders."""
    gateway: str = "http://127.0.0.1:8100"
    """Address of the gateway."""
    key: str | None = None
    """A control key of the gateway, or a runner's. Prefer STEPWELL_ENVS_KEY: other users can read a command line."""
    python: str | None = None
    """Python of the environment that has the framework; without it, this one."""
    config: str | None = None
    """JSON file with settings of the framework. verifiers: env, sampling, limit. Harbor: fields of its TrialConfig."""
    variables: Listed = ()
    """Environment variables that the framework gets besides the basic ones (PATH, HOME, LANG, SSL_CERT_FILE …): keys of
    other services, PYTHONPATH, DOCKER_HOST, HTTPS_PROXY. A variable that is not named here does not reach it."""
    channel: str = "train"
    """The channel of the trajectories."""
    group_size: int = Field(default=8, ge=1, validation_alias=GROUP_SIZE)
    """Rollouts of each task. --n-rollouts is another name of this flag."""
    groups: int | None = Field(default=None, ge=1)
    """Groups to make; without it, as many as the epochs have."""
    epochs: int | None = Field(default=1, ge=1)
    """How often every task comes."""
    seed: int | None = 0
    """Seed of the order of the tasks."""
    concurrency: int = Field(default=16, ge=1)
    """Rollouts at once."""
    timeout: float = Field(default=600.0, gt=0)
    """Seconds of one rollout, the scoring included."""
    retries: int = Field(default=3, ge=0)
    """New tries of a rollout that failed for a reason outside the policy."""
