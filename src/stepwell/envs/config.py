"""What an environment and its servers are told: defaults < YAML < flags. An unknown key is an error.

A field's docstring is its line in --help. An environment's own settings are fields of a subclass of BaseEnvConfig,
named by its class attribute `env_config_cls`.
"""

from enum import StrEnum

from pydantic import BaseModel, ConfigDict, Field, field_validator


class EvalHandling(StrEnum):
    """What becomes of training while an evaluation runs. What was begun before is finished in any case."""

    STOP_TRAIN = "STOP_TRAIN"
    LIMIT_TRAIN = "LIMIT_TRAIN"
    NONE = "NONE"


class EnvSection(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, protected_namespaces=())


class BaseEnvConfig(EnvSection):
    group_size: int = Field(default=4, ge=1)
    """Rollouts of one item, which are trained together."""
    max_num_workers: int = Field(default=-1, ge=-1)
    """Groups under way at once; -1 is max_num_workers_per_node for each server."""
    max_num_workers_per_node: int = Field(default=8, ge=1)
    """Groups under way at once for each server, where max_num_workers is -1."""
    max_eval_workers: int = Field(default=16, ge=1)
    """Rollouts of an evaluation under way at once."""
    steps_per_eval: int = Field(default=100, ge=0)
    """Training steps between two evaluations; 0 never evaluates."""
    eval_handling: EvalHandling = EvalHandling.STOP_TRAIN
    """While an evaluation runs: STOP_TRAIN starts no new groups, LIMIT_TRAIN fewer of them, NONE as many as ever."""
    eval_limit_ratio: float = Field(default=0.5, ge=0, le=1)
    """Share of the workers that LIMIT_TRAIN leaves to training."""
    max_token_length: int = Field(default=2048, ge=1)
    """Tokens a rollout may have; also this environment's part in dividing the servers between environments."""
    inference_weight: float = 1.0
    """This environment's weight when the servers are divided between environments; below 0 it takes no part."""
    batch_size: int = Field(default=-1, ge=-1)
    """Sequences in a batch of the trainer's; -1 asks the rollout server, which overrules any other value."""
    max_batches_offpolicy: int = Field(default=3, ge=0)
    """Batches that may wait for the trainer before no more groups are started; 0 sets no limit."""
    min_batch_allocation: float | None = Field(default=None, ge=0, le=1)
    """Share of every batch that is kept for this environment."""
    total_steps: int = Field(default=1000, ge=-1)
    """Training step at which the environment ends; -1 asks the rollout server."""
    worker_timeout: float = 600.0
    """Seconds a group may take before it is given up; 0 or less sets no limit."""
    ensure_scores_are_not_same: bool = True
    """Drop groups whose scores are all the same: they teach nothing."""
    tokenizer_name: str | None = None
    """Name or folder of the Hugging Face tokenizer; without one, that of the first server."""
    rollout_server_url: str = "http://localhost:8000"
    """Address of the rollout server: stepwell atropos."""
    rollout_server_key: str | None = None
    """Key that the rollout server asks for."""
    include_messages: bool = False
    """Send the messages along, to be read; where a rollout has none, its decoded tokens."""
    data_path_to_save_groups: str | None = None
    """JSON lines file to which every group is appended that is sent."""
    use_wandb: bool = False
    """Log to Weights & Biases."""
    wandb_name: str | None = None
    """Name of this environment in logs, in checkpoints and at the rollout server; without one, that of its class."""
    num_rollouts_to_keep: int = Field(default=32, ge=0)
    """Rollouts in the table that is logged."""
    min_items_sent_before_logging: int = 2
    """Groups sent before a new training step is a reason to log; 0 or less logs at every step."""

    @field_validator("rollout_server_url")
    @classmethod
    def _is_address(cls, value: str) -> str:
        if not value.startswith(("http://", "https://")):
            raise ValueError(f"{value!r} is no address; write http://host:port")
        return value.rstrip("/")


class APIServerConfig(EnvSection):
    """A server that an environment samples from: anything that speaks OpenAI's API, or Stepwell's gateway."""

    base_url: str = "http://localhost:8100/v1"
    """Address of the server, with its /v1."""
    api_key: str | None = None
    """Key that the server asks for; the gateway's control key."""
    model_name: str = "default"
    """Model to ask for."""
    tokenizer_name: str | None = None
    """Name or folder of the model's Hugging Face tokenizer; without one, the model's name."""
    timeout: float = Field(default=1200.0, gt=0)
    """Seconds a request may take."""
    num_max_requests_at_once: int = Field(default=512, ge=1)
    """Requests under way at once."""
    num_requests_for_eval: int = Field(default=64, ge=1)
    """Requests of evaluations under way at once."""
    health_check: bool = True
    """Ask the server now and then whether it is well, and prefer those that are."""
