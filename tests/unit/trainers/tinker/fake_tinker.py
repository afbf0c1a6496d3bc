"""A Tinker service in the test's own process. Its weights are the list of what was trained, so that a test can see what
is in them twice or not at all; the digest of that list stands for an adapter."""

import io
import json
import sys
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from types import ModuleType, SimpleNamespace
from typing import Any, Generic, TypeVar

import numpy as np
import pytest

T = TypeVar("T")


@dataclass
class Done(Generic[T]):
    value: T

    def result(self) -> T:
        return self.value


@dataclass(frozen=True)
class FakeDatum:
    model_input: list[int]
    loss_fn_inputs: Mapping[str, Any]


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """The names of tinker's types; the real ones are checked in SkyRL's environment."""
    module: Any = ModuleType("tinker")
    module.types = SimpleNamespace(
        Datum=FakeDatum, ModelInput=SimpleNamespace(from_ints=list), AdamParams=lambda **values: values
    )
    monkeypatch.setitem(sys.modules, "tinker", module)


class FakeTinker:
    def __init__(self) -> None:
        self.states: dict[str, list[str]] = {}
        self.archives: dict[str, bytes] = {}
        self.clients: list[FakeTrainingClient] = []
        self.url = ""
        self.off_by = 0.0
        """How far its log-probabilities are from the recorded ones."""
        self.is_skyrl = False
        """It tells paths of sampler weights without their kind."""
        self.dies_at: str | None = None
        """The call that fails after the service has done it."""

    def create_lora_training_client(self, base_model: str, rank: int) -> "FakeTrainingClient":
        return self._client([])

    def create_training_client_from_state_with_optimizer(self, path: str) -> "FakeTrainingClient":
        return self._client(self.states[path])

    def create_rest_client(self) -> "FakeTinker":
        return self

    def get_checkpoint_archive_url(self, training_run_id: str, checkpoint_id: str) -> Done[Any]:
        kind, _, name = checkpoint_id.rpartition("/")
        assert kind == ("" if self.is_skyrl else "sampler_weights")
        return Done(SimpleNamespace(url=f"{self.url}/{training_run_id}/sampler_weights/{name}"))

    def delete_checkpoint(self, training_run_id: str, checkpoint_id: str) -> Done[None]:
        kept = self.states if checkpoint_id.startswith("weights/") else self.archives
        del kept[f"tinker://{training_run_id}/{checkpoint_id}"]
        return Done(None)

    def _client(self, trained: Sequence[str]) -> "FakeTrainingClient":
        self.clients.append(FakeTrainingClient(self, len(self.clients), list(trained)))
        return self.clients[-1]

    def done(self, call: str, value: T) -> Done[T]:
        if self.dies_at == call:
            self.dies_at = None
            raise ConnectionError(f"the answer to {call} was lost")
        return Done(value)


@dataclass
class FakeTrainingClient:
    service: FakeTinker
    number: int
    trained: list[str]
    """What is in the weights."""
    pending: list[str] = field(default_factory=list)
    sent: list[Any] = field(default_factory=list)
    """The datums of all backward passes."""
    asked: list[Any] = field(default_factory=list)
    """The loss functions with their configurations, and the optimizer's settings."""

    def forward(self, data: list[Any], loss_fn: Any, loss_fn_config: Any = None) -> Done[Any]:
        """Each token is as likely as one in e."""
        self.asked.append(("forward", loss_fn, loss_fn_config))
        lengths = [len(datum.loss_fn_inputs["target_tokens"]) for datum in data]
        outputs = [{"logprobs": SimpleNamespace(data=np.full(length, -1.0, np.float32))} for length in lengths]
        return self.service.done("forward", SimpleNamespace(loss_fn_outputs=outputs, metrics={}))

    def forward_backward(self, data: list[Any], loss_fn: Any, loss_fn_config: Any = None) -> Done[Any]:
        self.asked.append((loss_fn, loss_fn_config))
        self.sent += data
        self.pending += [_name(datum) for datum in data if np.any(datum.loss_fn_inputs["advantages"])]
        outputs = [
            {"logprobs": SimpleNamespace(data=datum.loss_fn_inputs["logprobs"] + self.service.off_by)} for datum in data
        ]
        return self.service.done("forward_backward", SimpleNamespace(loss_fn_outputs=outputs, metrics={}))

    def optim_step(self, adam_params: Any) -> Done[Any]:
        self.asked.append(adam_params)
        self.trained += self.pending
        self.pending = []
        return self.service.done("optim_step", None)

    def save_state(self, name: str) -> Done[Any]:
        path = f"tinker://{self.number}/weights/{name}"
        self.service.states[path] = list(self.trained)
        return self.service.done("save_state", SimpleNamespace(path=path))

    def save_weights_for_sampler(self, name: str) -> Done[Any]:
        path = f"tinker://{self.number}/sampler_weights/{name}"
        self.service.archives[path] = adapter_archive(json.dumps(self.trained).encode())
        told = path.replace("/sampler_weights/", "/") if self.service.is_skyrl else path
        return self.service.done("save_weights_for_sampler", SimpleNamespace(path=told))


def _name(datum: FakeDatum) -> str:
    return "-".join(map(str, [*datum.model_input, datum.loss_fn_inputs["target_tokens"][-1]]))


def adapter_archive(
    weights: bytes, names: Sequence[str] = ("adapter_model.safetensors", "adapter_config.json")
) -> bytes:
    whole = io.BytesIO()
    with tarfile.open(fileobj=whole, mode="w:gz") as tar:
        for name in names:
            content = weights if name.endswith("safetensors") else b"{}"
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return whole.getvalue()


@contextmanager
def serve_archives(service: FakeTinker) -> Iterator[FakeTinker]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            content = service.archives[f"tinker:/{self.path}"]
            self.send_response(200)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        service.url = f"http://127.0.0.1:{server.server_port}"
        thread = Thread(target=server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        try:
            yield service
        finally:
            server.shutdown()
            thread.join()
