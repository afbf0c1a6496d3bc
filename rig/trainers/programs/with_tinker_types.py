"""A batch as the real tinker package's types. Run in SkyRL's environment."""

import inspect
import json
import sys
from importlib import import_module
from typing import Any

import numpy as np
import tinker  # type: ignore[import-not-found]
from tinker import types

from stepwell.trainers.tinker import datums as service_ports
from stepwell.trainers.tinker.datums import DatumRow, to_datums
from stepwell.trainers.tinker.tinker_settings import TinkerSettings

PORTS = {
    service_ports.TrainingClient: tinker.TrainingClient,
    service_ports.TrainingService: tinker.ServiceClient,
    service_ports.StoredWeights: import_module("tinker.lib.public_interfaces.rest_client").RestClient,
}


def main() -> None:
    row = DatumRow(
        inputs=np.array([1, 2, 3], np.int32),
        targets=np.array([2, 3, 4], np.int32),
        logprobs=np.array([0.0, -1.5, -0.25], np.float32),
        advantages=np.array([0.0, 0.5, -0.5], np.float32),
        versions=np.array([-1, 1, 1]),
    )
    (datum,) = to_datums([row])
    fields = {
        name: {"dtype": tensor.dtype, "shape": tensor.shape, "data": tensor.to_numpy().tolist()}
        for name, tensor in datum.loss_fn_inputs.items()
    }
    settings = TinkerSettings()
    adam = types.AdamParams(learning_rate=settings.learning_rate, grad_clip_norm=settings.max_gradient_norm)
    answer = {
        "is_datum": isinstance(datum, types.Datum),
        "inputs": datum.model_input.to_ints(),
        "fields": fields,
        "losses": list(types.LossFnType.__args__),
        "adam": adam.model_dump(),
        "missing": missing(),
    }
    sys.stdout.write(f"{json.dumps(answer)}\n")


def missing() -> list[str]:
    """Calls that we make and tinker's clients do not have, or not with these parameters."""
    found = []
    for port, theirs in PORTS.items():
        for name, ours in inspect.getmembers(port, inspect.isfunction):
            if name.startswith("_"):
                continue
            call: Any = getattr(theirs, name, None)
            taken = inspect.signature(call).parameters if call is not None else {}
            if set(inspect.signature(ours).parameters) - set(taken):
                found.append(f"{theirs.__name__}.{name}")
    return found


if __name__ == "__main__":
    main()
