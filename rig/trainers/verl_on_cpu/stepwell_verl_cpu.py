"""verl on a machine without GPUs: a platform `cpu` (VERL_PLATFORM=cpu, VERL_USE_EXTERNAL_MODULES=stepwell_verl_cpu).

verl knows platforms with devices only. Here the CPU pretends to be one, and collectives go over gloo.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
import verl.utils.distributed as verl_distributed
from verl.plugin.platform.platform_base import PlatformBase
from verl.plugin.platform.platform_manager import PlatformRegistry

MEMORY = 8 << 30
NOTHING = ("empty_cache", "ipc_collect", "reset_peak_memory_stats", "manual_seed", "manual_seed_all", "set_device")
NO_BYTES = ("max_memory_allocated", "max_memory_reserved", "memory_allocated", "memory_reserved")


def _device_module() -> ModuleType:
    """torch.cpu, with what torch.cuda has besides."""
    module = ModuleType("stepwell_verl_cpu_device")
    vars(module).update({name: getattr(torch.cpu, name) for name in dir(torch.cpu)})
    vars(module).update({name: lambda *args, **kwargs: None for name in (*NOTHING, "synchronize")})
    vars(module).update({name: lambda *args, **kwargs: 0 for name in NO_BYTES})
    vars(module).update(
        get_rng_state=lambda *args, **kwargs: torch.get_rng_state(),
        set_rng_state=lambda state, *args, **kwargs: torch.set_rng_state(state),
        current_device=lambda: 0,
        device_count=lambda: 1,
        is_available=lambda: True,
        mem_get_info=lambda *args, **kwargs: (MEMORY, MEMORY),
        get_device_name=lambda *args, **kwargs: "cpu",
    )
    return module


DEVICE_MODULE = _device_module()


@PlatformRegistry.register(platform="cpu")
class CpuPlatform(PlatformBase):  # type: ignore[misc]  # verl has no types
    device_name = "cpu"
    vendor_name = "cpu"
    device_module = DEVICE_MODULE

    def is_available(self) -> bool:
        return True

    def current_device(self) -> torch.device:
        return torch.device("cpu")

    def device_count(self) -> int:
        return 1

    def set_device(self, device_index: int) -> None: ...

    def synchronize(self, device_index: int | None = None) -> None: ...

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        torch.manual_seed(seed)

    def set_allocator_settings(self, settings: str) -> None: ...

    def empty_cache(self) -> None: ...

    def get_device_capability(self, device_index: int = 0) -> tuple[None, None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "CUDA_VISIBLE_DEVICES"

    @contextmanager
    def nvtx_range(self, msg: str) -> Iterator[None]:
        yield

    def profiler_start(self) -> None: ...

    def profiler_stop(self) -> None: ...

    def ray_resource_name(self) -> str:
        return "GPU"

    def ray_resource_options(self, num_gpus: float) -> dict[str, Any]:
        return {"num_gpus": num_gpus}

    def ray_noset_envvars(self) -> list[str]:
        return []

    def is_ipc_supported(self) -> bool:
        return False

    def cudart(self) -> None: ...


def _over_gloo_alone() -> None:
    """verl names the backends of the CPU and of the device, which torch refuses if both are the CPU's."""
    original = verl_distributed.initialize_global_process_group_ray

    def initialize(timeout_second: int | None = None, backend: str | None = None) -> None:
        original(timeout_second, backend or "cpu:gloo")

    verl_distributed.initialize_global_process_group_ray = initialize


_over_gloo_alone()
