"""Weights from the trainer's GPU straight into those of the engines, over NCCL.

**No GPU has run this yet.** It was written against the source of vLLM 0.32; tests check its calls and their order.
Its syncs compare log-probabilities like all others, so wrong weights are noticed.

Start vLLM with `--weight-transfer-config '{"backend": "nccl"}'`.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from importlib import import_module
from typing import TYPE_CHECKING, Protocol

from stepwell.engines.engine import EngineControl, TensorInfo, WeightGroup
from stepwell.errors import BadRequest
from stepwell.trainers.transfers import on_each
from stepwell.trainers.weight_stream import WeightStream, split_stream

if TYPE_CHECKING:
    import torch


CHUNK_BYTES = 2**30
"""Bytes of tensors that engines are told of at once."""


class Broadcast(Protocol):
    """The trainer's end of a group of GPUs: rank 0, which sends."""

    def send(self, tensor: "torch.Tensor") -> None: ...

    def finish(self) -> None:
        """Returns once everything is sent."""


class NcclTransfer:
    """The trainer at `address`:`port` is rank 0; each engine has `workers` ranks after it (its GPUs: tensor parallel ×
    pipeline parallel × data parallel). A new group is opened after a failure, and if other engines take part than last
    time."""

    is_collective = True

    def __init__(
        self,
        address: str,
        port: int,
        *,
        workers: int = 1,
        open_group: "Callable[[str, int, int], Broadcast] | None" = None,
    ) -> None:
        self._address = address
        self._port = port
        self._workers = workers
        self._open_group = open_group or VllmBroadcast
        self._group: Broadcast | None = None
        self._members: list[str] = []
        self._weights: WeightStream = ()

    def exclusive(self) -> AbstractContextManager[None]:
        """The group has only one sender."""
        return nullcontext()

    def prepare(self, weights: WeightStream, engines: Sequence[EngineControl]) -> None:
        self._weights = weights
        self._group = self._group_of(engines)

    def update(self, engines: Sequence[EngineControl]) -> None:
        """Engines receive while the trainer sends: neither call ends before the other."""
        group, self._group = self._group_of(engines), None  # an engine may have failed since `prepare`
        on_each(engines, lambda engine: engine.begin_weights())
        for chunk in split_stream(self._weights, CHUNK_BYTES):
            self._send(chunk, group, engines)
        on_each(engines, lambda engine: engine.end_weights())
        self._group = group

    def _send(self, chunk: "dict[str, torch.Tensor]", group: Broadcast, engines: Sequence[EngineControl]) -> None:
        tensors = [
            TensorInfo(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
            for name, tensor in chunk.items()
        ]
        receiving = _in_background(lambda: on_each(engines, lambda engine: engine.receive_weights(tensors)))
        for tensor in chunk.values():
            if receiving.done():  # it was refused: a send without a receiver waits forever
                receiving.result()
            group.send(tensor.contiguous())
        receiving.result()
        group.finish()

    def _group_of(self, engines: Sequence[EngineControl]) -> Broadcast:
        members = [engine.url for engine in engines]
        if self._group is not None and members == self._members:
            return self._group
        self._members = members
        group = WeightGroup(self._address, self._port, 1 + len(engines) * self._workers)
        first_rank = {engine.url: 1 + place * self._workers for place, engine in enumerate(engines)}
        joining = _in_background(
            lambda: on_each(engines, lambda engine: engine.join_weight_group(group, first_rank[engine.url]))
        )
        broadcast = self._open_group(*group)
        joining.result()
        return broadcast


class VllmBroadcast:
    """vLLM's own communicator, so both ends run the same code: the trainer's environment needs vLLM too."""

    def __init__(self, address: str, port: int, world_size: int) -> None:
        try:
            common = import_module("vllm.distributed.weight_transfer.nccl_common")
        except ModuleNotFoundError as missing:
            raise BadRequest("NcclTransfer needs vLLM in the trainer's environment too: pip install vllm") from missing
        place = {"master_address": address, "master_port": port, "world_size": world_size}
        self._communicator = common.trainer_init(place)

    def send(self, tensor: "torch.Tensor") -> None:
        import torch

        self._communicator.broadcast(tensor, src=0, stream=torch.cuda.current_stream())

    def finish(self) -> None:
        import torch

        torch.cuda.current_stream().synchronize()


def _in_background(call: Callable[[], list[None]]) -> "Future[list[None]]":
    """In a thread that is not joined if the caller fails: the engine may wait for tensors that never come."""
    thread = ThreadPoolExecutor(1)
    future = thread.submit(call)
    thread.shutdown(wait=False)
    return future
