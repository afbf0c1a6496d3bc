"""The used part of the tinker package's clients, as Protocols: tinker is optional, and any service that speaks its API
will do."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, TypeAlias, TypeVar

T_co = TypeVar("T_co", covariant=True)

Datum: TypeAlias = Any
"""tinker.types.Datum; Any, because tinker is optional."""


class ServiceFuture(Protocol[T_co]):
    def result(self) -> T_co: ...


class SavedPath(Protocol):
    @property
    def path(self) -> str: ...


class PassOutput(Protocol):
    @property
    def loss_fn_outputs(self) -> Sequence[Mapping[str, Any]]: ...

    @property
    def metrics(self) -> Mapping[str, float]: ...


class TrainingClient(Protocol):
    """tinker.TrainingClient: one adapter, with its optimizer."""

    def forward(
        self, data: list[Datum], loss_fn: Any, loss_fn_config: dict[str, float] | None = None
    ) -> ServiceFuture[PassOutput]: ...

    def forward_backward(
        self, data: list[Datum], loss_fn: Any, loss_fn_config: dict[str, float] | None = None
    ) -> ServiceFuture[PassOutput]: ...

    def optim_step(self, adam_params: Any) -> ServiceFuture[Any]: ...

    def save_state(self, name: str) -> ServiceFuture[SavedPath]: ...

    def save_weights_for_sampler(self, name: str) -> ServiceFuture[SavedPath]: ...


class StoredWeights(Protocol):
    """tinker's RestClient: what the service has saved."""

    def get_checkpoint_archive_url(self, training_run_id: str, checkpoint_id: str) -> ServiceFuture[Any]: ...

    def delete_checkpoint(self, training_run_id: str, checkpoint_id: str) -> ServiceFuture[None]: ...


class TrainingService(Protocol):
    """tinker.ServiceClient."""

    def create_lora_training_client(self, base_model: str, rank: int) -> TrainingClient: ...

    def create_training_client_from_state_with_optimizer(self, path: str) -> TrainingClient: ...

    def create_rest_client(self) -> StoredWeights: ...
