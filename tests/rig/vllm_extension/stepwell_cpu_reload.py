"""A worker extension that lets vLLM on a CPU take new weights; imported inside vLLM's environment only.

On a CPU vLLM packs each linear layer's weights when the model is loaded and computes with the packed copy ever after:
`reload_weights` changes embeddings and norms and nothing else. Here the layers compute with the weights themselves.
vLLM imports this module before it loads the model, which is early enough to put the function in place.
"""

import time

import torch
from vllm.model_executor.layers import utils


def _compute_with_the_weights_themselves(layer: torch.nn.Module, remove_weight: bool) -> None:
    layer.cpu_linear = torch.nn.functional.linear  # type: ignore[assignment]


utils.dispatch_cpu_unquantized_gemm = _compute_with_the_weights_themselves


class CpuReload:
    """Mixed into vLLM's worker. Importing its module is all that new weights need."""

    def take_time(self, seconds: float) -> None:
        """Sleep before each pass of the model, or no longer.

        A tiny model on a CPU keeps vLLM's front process so busy that an answer can be over before any other request
        is served; a test that has to reach a call under way slows it down until it is there.
        """
        runner = self.model_runner  # type: ignore[attr-defined]
        at_once = type(runner).execute_model

        def execute_model(*args: object, **named: object) -> object:
            time.sleep(seconds)
            return at_once(runner, *args, **named)

        if seconds:
            runner.execute_model = execute_model
        else:
            vars(runner).pop("execute_model", None)
