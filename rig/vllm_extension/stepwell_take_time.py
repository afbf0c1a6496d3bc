"""The demo's worker extension, and a way for tests to slow vLLM down; imported inside vLLM's environment only.

With it, vLLM's worker naps while it waits for something to do. By itself it waits in a busy loop, for a second after
each pass, and so takes a core from everything else that a test runs.
"""

import time

from stepwell_cpu_reload import CpuReload  # type: ignore[import-not-found]
from vllm.distributed.device_communicators import shm_broadcast

NAP = 0.0005
"""Seconds."""

shm_broadcast.sched_yield = lambda: time.sleep(NAP)


class TakeTime(CpuReload):  # type: ignore[misc]
    """Mixed into vLLM's worker."""

    def take_time(self, seconds: float) -> None:
        """Sleep before each pass of the model, or no longer.

        A tiny model on a CPU keeps vLLM's front process so busy that an answer can be over before any other request
        is served; a test that has to reach a call under way slows it down until it is there.
        """
        runner = self.model_runner
        at_once = type(runner).execute_model

        def execute_model(*args: object, **named: object) -> object:
            time.sleep(seconds)
            return at_once(runner, *args, **named)

        if seconds:
            runner.execute_model = execute_model
        else:
            runner.__dict__.pop("execute_model", None)
