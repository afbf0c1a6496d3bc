"""Settings of an environment and its servers: defaults < YAML < flags.

An unknown key is kept and changes nothing, as in Atropos; the log names it.

A field's docstring is its line in --help. An environment's own settings are fields of a subclass of BaseEnvConfig; its
class attribute `env_config_cls` names that subclass.
"""

from collections.abc import Sequence
from difflib import get_close_matches
from enum import StrEnum
from typing import Literal

from pydantic import AliasChoices, BaseModel, ConfigDict, Field, field_validator


class EvalHandling(StrEnum):
    """How an evaluation affects training. Groups that have begun are always finished."""

    STOP_TRAIN = "STOP_TRAIN"
    LIMIT_TRAIN = "LIMIT_TRAIN"
    NONE = "NONE"


class EnvSection(BaseModel):
    model_config = ConfigDict(extra="allow", use_attribute_docstrings=True, protected_namespaces=())


class BaseEnvConfig(EnvSection):
    group_size: int = Field(default=4, ge=1)
    """Rollouts of one item; they are trained together."""
    max_num_workers: int = Field(default=-1, ge=-1)
    """Concurrent groups; -1 means max_num_workers_per_node for each server."""
    max_num_workers_per_node: int = Field(default=8, ge=1)
    """Concurrent groups for each server, if max_num_workers is -1."""
    max_eval_workers: int = Field(default=16, ge=1)
    """Concurrent rollouts of an evaluation."""
    steps_per_eval: int = Field(default=100, ge=0)
    """Training steps between two evaluations; 0 means never."""
    eval_handling: EvalHandling = EvalHandling.STOP_TRAIN
    """While an evaluation runs: STOP_TRAIN starts no groups, LIMIT_TRAIN fewer than usual, NONE as many as usual."""
    eval_limit_ratio: float = Field(default=0.5, ge=0, le=1)
    """Share of the concurrent groups that LIMIT_TRAIN leaves to training."""
    max_token_length: int = Field(default=2048, ge=1)
    """Most tokens of a rollout; also used to divide the servers between environments."""
    inference_weight: float = 1.0
    """Weight of this environment when the servers are divided between environments; below 0 it is left out."""
    batch_size: int = Field(default=-1, ge=-1)
    """Sequences in a trainer's batch; -1 asks the rollout server, whose value overrides any other."""
    max_batches_offpolicy: int = Field(
        default=3, ge=0, validation_alias=AliasChoices("max_batches_offpolicy", "off_policy_tolerance")
    )
    """No groups are started while so many batches wait for the trainer; 0 means no limit."""
    min_batch_allocation: float | None = Field(default=None, ge=0, le=1)
    """Share of every batch that is reserved for this environment."""
    total_steps: int = Field(default=1000, ge=-1)
    """Training step at which the environment ends; -1 asks the rollout server."""
    worker_timeout: float = 600.0
    """Seconds after which a group is given up; 0 or less means no limit."""
    ensure_scores_are_not_same: bool = True
    """Drop groups whose scores are all equal: they have no advantage to train on."""
    tokenizer_name: str | None = None
    """Name or folder of the Hugging Face tokenizer; by default that of the first server."""
    rollout_server_url: str = "http://localhost:8000"
    """Address of the rollout server: stepwell atropos."""
    rollout_server_key: str | None = None
    """Key for the rollout server."""
    include_messages: bool = False
    """Send the messages too; for a rollout without messages, its decoded tokens."""
    data_path_to_save_groups: str | None = None
    """JSON lines file to which every sent group is appended."""
    use_wandb: bool = False
    """Log to Weights & Biases."""
    wandb_name: str | None = None
    """Name of this environment in logs, in checkpoints and at the rollout server; by default that of its class."""
    num_rollouts_to_keep: int = Field(default=32, ge=0)
    """Groups in the logged table."""
    num_rollouts_per_group_for_logging: int = Field(default=1, ge=-1)
    """Rollouts of a group in the logged table; -1 means all."""
    data_dir_to_save_evals: str | None = None
    """Folder to which evaluate_log writes its results."""
    thinking_mode: bool = False
    """Ask the servers for reasoning; on if reasoning_effort or max_reasoning_tokens is set."""
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    """How much the servers shall reason."""
    max_reasoning_tokens: int | None = Field(default=None, ge=1)
    """Most tokens of reasoning; reasoning_effort overrides it."""
    custom_thinking_prompt: str | None = None
    """The prompt for reasoning of environments that have their own."""
    min_items_sent_before_logging: int = 2
    """A new training step is logged after so many sent groups; 0 or less logs every step."""

    @field_validator("rollout_server_url")
    @classmethod
    def _is_address(cls, value: str) -> str:
        if not value.startswith(("http://", "https://")):
            raise ValueError(f"{value!r} is no address; write http://host:port")
        return value.rstrip("/")


class ServerBaseline(EnvSection):
    """The common settings of all servers. Without addresses, it stands for one server at the default address."""

    model_name: str = "default"
    """Name of the model in requests."""
    tokenizer_name: str | None = None
    """Name or folder of the model's Hugging Face tokenizer; by default the model's name."""
    timeout: float = Field(default=1200.0, gt=0)
    """Timeout of a request in seconds."""
    num_max_requests_at_once: int = Field(default=512, ge=1)
    """Concurrent requests."""
    num_requests_for_eval: int = Field(default=64, ge=0)
    """Concurrent requests of evaluations; 0, which files of Atropos without one give, is as 1."""
    server_type: str = "openai"
    """A field that is not used: every server is called with OpenAI's API."""
    rolling_buffer_length: int = 1000
    """Calls whose durations are kept for the metrics of the server."""

    @field_validator("tokenizer_name")
    @classmethod
    def _is_named(cls, value: str | None) -> str | None:
        return None if value == "none" else value


class APIServerConfig(ServerBaseline):
    """A server that an environment samples from: anything that speaks OpenAI's API, or Stepwell's gateway."""

    base_url: str | None = "http://localhost:8100/unrecorded/v1"
    """Address of the server, with its /v1; a gateway's is /unrecorded/v1, because the environment keeps the tokens.
    None is OpenAI's own."""
    api_key: str | None = None
    """Key for the server; for a gateway, its control key."""
    n_kwarg_is_ignored: bool = False
    """The server gives one choice whatever `n` is: a call with `n` becomes so many calls."""
    health_check: bool = True
    """Avoid the server while it cannot be reached, and check when it is back."""


def as_server_configs(given: ServerBaseline | Sequence[APIServerConfig]) -> tuple[APIServerConfig, ...]:
    """One server, several, or a baseline without an address."""
    if isinstance(given, APIServerConfig):
        return (given,)
    return (APIServerConfig(**given.model_dump()),) if isinstance(given, ServerBaseline) else tuple(given)


def unknown_settings(section: BaseModel, prefix: str) -> list[str]:
    """A sentence for each key that the section has no field for. It does not contain the value, which may be secret."""
    return [
        f"{prefix}{name}: there is no such setting; it changes nothing"
        + "".join(
            f"; did you mean {prefix}{near}?" for near in get_close_matches(name, type(section).model_fields, n=1)
        )
        for name in section.model_extra or ()
    ]
