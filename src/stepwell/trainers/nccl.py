"""Weights straight from the trainer's GPU into those of the engines, by vLLM's weight-transfer routes.

**No GPU has run this yet.** It was written against vLLM 0.32 as read, and its calls were tested for what they say and
for their order. Its syncs compare log-probabilities as all others do, so weights that arrive wrong are noticed.

Start vLLM with `--weight-transfer-config '{"backend": "nccl"}'`.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from importlib import import_module
from typing import TYPE_CHECKING, Protocol

from stepwell.engines.vllm import VllmControl, on_each
from stepwell.errors import BadRequest
from stepwell.steps.step import Json, JsonObject
from stepwell.trainers.transfers import Weights

if TYPE_CHECKING:
    import torch


class Broadcast(Protocol):
    """The trainer's end of a group of GPUs: rank 0, which sends."""

    def send(self, tensor: "torch.Tensor") -> None: ...

    def finish(self) -> None:
        """Returns once all that was sent has left."""


class NcclTransfer:
    """The trainer at `address`:`port` is rank 0; each engine has `workers` ranks after it (its GPUs: tensor parallel ×
    pipeline parallel × data parallel). A group that broke down is not opened anew: restart the trainer."""

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
        self._weights: Weights = {}

    def exclusive(self) -> AbstractContextManager[None]:
        """The group itself has one sender only."""
        return nullcontext()

    def prepare(self, weights: Weights, engines: Sequence[VllmControl]) -> None:
        self._weights = weights
        if self._group is None:
            self._group = self._opened(engines)

    def update(self, engines: Sequence[VllmControl]) -> None:
        """Engines receive while the trainer sends: neither call ends before the other."""
        assert self._group is not None
        on_each(engines, lambda engine: engine.post("/start_weight_update"))
        told = self._update_info()
        receiving = _beside(lambda: on_each(engines, lambda engine: engine.post("/update_weights", told)))
        for tensor in self._weights.values():
            if receiving.done():  # it was refused: whoever sends to no one waits for ever
                receiving.result()
            self._group.send(tensor.detach().contiguous())
        receiving.result()
        self._group.finish()
        on_each(engines, lambda engine: engine.post("/finish_weight_update"))

    def _opened(self, engines: Sequence[VllmControl]) -> Broadcast:
        world_size = 1 + len(engines) * self._workers
        first_rank = {engine: 1 + place * self._workers for place, engine in enumerate(engines)}

        def join(engine: VllmControl) -> JsonObject:
            place: dict[str, Json] = {
                "master_address": self._address,
                "master_port": self._port,
                "rank_offset": first_rank[engine],
                "world_size": world_size,
            }
            return engine.post("/init_weight_transfer_engine", {"init_info": place})

        joining = _beside(lambda: on_each(engines, join))
        group = self._open_group(self._address, self._port, world_size)
        joining.result()
        return group

    def _update_info(self) -> JsonObject:
        tensors = self._weights.values()
        return {
            "update_info": {
                "names": list(self._weights),
                "dtype_names": [str(tensor.dtype).removeprefix("torch.") for tensor in tensors],
                "shapes": [list(tensor.shape) for tensor in tensors],
            }
        }


class VllmBroadcast:
    """By vLLM's own communicator, so that both ends are of one make: the trainer's environment needs vLLM too."""

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


def _beside(call: Callable[[], list[JsonObject]]) -> "Future[list[JsonObject]]":
    """In a thread that is not waited for, should this one fail: the engine may be waiting for what will not come."""
    thread = ThreadPoolExecutor(1)
    future = thread.submit(call)
    thread.shutdown(wait=False)
    return future
