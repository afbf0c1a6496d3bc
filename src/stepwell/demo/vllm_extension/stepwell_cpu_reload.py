"""A worker extension with which vLLM on a CPU accepts new weights; imported only in vLLM's environment.

On a CPU vLLM packs the weights of each linear layer when it loads the model, and computes with the packed copy:
`reload_weights` then changes only embeddings and norms. With this module the layers compute with the weights.
vLLM imports this module before it loads the model, so the function is replaced in time.
"""

import torch
from vllm.model_executor.layers import utils


def _use_unpacked_weights(layer: torch.nn.Module, remove_weight: bool) -> None:
    layer.cpu_linear = torch.nn.functional.linear  # type: ignore[assignment]


utils.dispatch_cpu_unquantized_gemm = _use_unpacked_weights


class CpuReload:
    """Mixed into vLLM's worker. It is empty: importing the module has the effect."""
