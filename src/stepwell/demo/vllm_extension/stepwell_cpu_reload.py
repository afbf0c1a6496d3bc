"""A worker extension that lets vLLM on a CPU take new weights; imported inside vLLM's environment only.

On a CPU vLLM packs each linear layer's weights when the model is loaded and computes with the packed copy ever after:
`reload_weights` changes embeddings and norms and nothing else. Here the layers compute with the weights themselves.
vLLM imports this module before it loads the model, which is early enough to put the function in place.
"""

import torch
from vllm.model_executor.layers import utils


def _compute_with_the_weights_themselves(layer: torch.nn.Module, remove_weight: bool) -> None:
    layer.cpu_linear = torch.nn.functional.linear  # type: ignore[assignment]


utils.dispatch_cpu_unquantized_gemm = _compute_with_the_weights_themselves


class CpuReload:
    """Mixed into vLLM's worker. Importing its module is all that new weights need."""
