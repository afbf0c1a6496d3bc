"""Runs Claw-R1's own agent flows by its own AgentFlowWorkerBase, in verl's environment: `python run_flows.py JSON`.

What it reaches of Stepwell is a URL. Its modules are the original's; one name of verl that they import is gone, and
`verl.utils.chat_template` stands for the module where verl has it now.
"""

import asyncio
import importlib
import json
import sys
from typing import Any

ALIASES = {"verl.utils.chat_template": "verl.utils.tokenizer.chat_template"}
"""The one module of verl that Claw-R1 imports and verl 0.9 has under another name."""


def main(asked: dict[str, Any]) -> None:
    sys.path.insert(0, asked["claw_r1"])
    sys.path.append(asked["packages"])  # openai, which the original's agent imports and verl does not bring
    for old, new in ALIASES.items():
        sys.modules[old] = importlib.import_module(new)
    config = composed(asked)
    told = asyncio.run(run_all(config, asked["batches"]))
    sys.stdout.write(json.dumps({"told": told, "files": files_of("claw_r1")}) + "\n")


def composed(asked: dict[str, Any]) -> Any:
    """The original's configuration, with what its example scripts change of it."""
    from hydra import compose, initialize_config_dir  # type: ignore[import-not-found, unused-ignore]
    from omegaconf import OmegaConf

    folder = f"{asked['claw_r1']}/claw_r1"
    rollout = "actor_rollout_ref.rollout"
    changes = [
        f"actor_rollout_ref.model.path={asked['model']}",
        f"data.max_prompt_length={asked['prompt_length']}",
        f"data.max_response_length={asked['response_length']}",
        "data.return_raw_chat=True",
        # transformers 5 answers a dictionary instead of ids, unless it is told not to
        "+data.apply_chat_template_kwargs.return_dict=False",
        f"{rollout}.n={asked['n']}",
        f"{rollout}.calculate_log_probs=true",
        f"{rollout}.agent.default_agent_flow=blackbox_gsm8k_agent",
        f"{rollout}.agent.agent_flow_config_path={folder}/blackbox_agent/agent_flow_config.yaml",
    ]
    with initialize_config_dir(f"{folder}/config", version_base=None):
        config = compose("async_ppo_trainer", overrides=changes)
    OmegaConf.resolve(config)  # the worker hands a part of it on, from which verl's new references cannot be followed
    return config


async def run_all(config: Any, batches: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One after the other, in one event loop, as a worker runs them."""
    return [await run(config, batch) for batch in batches]


async def run(config: Any, batch: dict[str, Any]) -> dict[str, Any]:
    """What the worker answers for the rows of a batch, or how it failed."""
    import numpy as np
    from claw_r1.agent_flow.agent_flow import AgentFlowWorkerBase  # type: ignore[import-not-found, unused-ignore]
    from verl.protocol import DataProto

    rows = batch["rows"]
    columns = {name: column(np, [row[name] for row in rows]) for name in rows[0]}
    worker = AgentFlowWorkerBase(config, batch["gateway"])
    try:
        return dict(await worker.generate_sequences(DataProto(non_tensor_batch=columns)))
    except Exception as failure:  # noqa: BLE001 - the test judges it
        return {"failed": f"{type(failure).__name__}: {failure}"}


def column(np: Any, values: list[Any]) -> Any:
    made = np.empty(len(values), dtype=object)
    made[:] = values
    return made


def files_of(package: str) -> dict[str, str]:
    """Which file each loaded module of the package is from."""
    loaded = ((name, getattr(module, "__file__", None)) for name, module in list(sys.modules.items()))
    return {name: file for name, file in loaded if file and name.split(".")[0] == package}


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
