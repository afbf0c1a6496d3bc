"""Harbor tasks (Harbor 0.25), each run as a trial: an agent in an environment, then the verifier.

    python harbor_tasks.py FOLDER [CONFIG.json]

The folder is a task, or has a task in each of its folders. The config has fields of Harbor's TrialConfig, such as
`agent` and `environment`. Without an environment, a task runs in LocalSandbox.
"""

import asyncio
import sys
import tempfile
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from pathlib import Path
from typing import Any

from task_server import INFRASTRUCTURE, failed, read_config, require, serve, take_stdout

LOCAL_SANDBOX = {"import_path": "local_sandbox:LocalSandbox"}
KEY_VARIABLE = "STEPWELL_ROLLOUT_KEY"
REWARD = "reward"
"""The reward that counts if a verifier gives several; else their mean."""


class HarborTasks:
    def __init__(self, folder: Path, config: dict[str, Any]) -> None:
        self._tasks = (
            [folder] if (folder / "task.toml").is_file() else sorted(path.parent for path in folder.glob("*/task.toml"))
        )
        if not self._tasks:
            raise SystemExit(f"no task.toml in {folder}, nor in a folder in it")
        self._config = {"trials_dir": tempfile.mkdtemp(prefix="harbor-trials-"), "environment": LOCAL_SANDBOX, **config}
        self.names: Sequence[str] = [task.name for task in self._tasks]

    def serving(self) -> AbstractAsyncContextManager[Any]:
        return nullcontext()

    async def run(self, asked: dict[str, Any]) -> dict[str, Any]:
        from harbor.trial.trial import Trial

        trial = await Trial.create(self._trial_config(asked))
        return _told(await trial.run())

    def _trial_config(self, asked: dict[str, Any]) -> Any:
        from harbor.models.trial.config import TrialConfig

        task = {"path": str(self._tasks[asked["task"]])}
        agent = _with_model(self._config.get("agent", {}), asked)
        return TrialConfig.model_validate({**self._config, "task": task, "agent": agent})


def _with_model(agent: dict[str, Any], asked: dict[str, Any]) -> dict[str, Any]:
    """The agent's settings, with the model of the rollout. An agent that Harbor cannot point at an endpoint gets it in
    OpenAI's variables."""
    from harbor.agents.factory import AgentFactory
    from harbor.models.trial.config import AgentConfig

    base_url, key = asked["base_url"], asked["api_key"]
    agent = {"model_name": f"openai/{asked['model']}", **agent}
    if AgentFactory.get_agent_class_from_config(AgentConfig.model_validate(agent)).MODEL_CONNECTION is None:
        return {**agent, "env": {**agent.get("env", {}), "OPENAI_BASE_URL": base_url, "OPENAI_API_KEY": key}}
    env = {**agent.get("env", {}), KEY_VARIABLE: key}
    return {**agent, "env": env, "base_url": base_url, "model_api_key_name": KEY_VARIABLE}


def _told(result: Any) -> dict[str, Any]:
    rewards = result.verifier_result.rewards if result.verifier_result is not None else None
    if rewards:
        return {"reward": float(rewards[REWARD] if REWARD in rewards else sum(rewards.values()) / len(rewards))}
    if result.exception_info is None:
        return failed(INFRASTRUCTURE, "the verifier gave no reward")
    kind = result.exception_info.exception_type
    why = f"{kind}: {result.exception_info.exception_message}"
    return failed("too_long" if kind == "AgentTimeoutError" else INFRASTRUCTURE, why)


def main() -> None:
    answers = take_stdout()
    require("harbor")
    tasks = HarborTasks(Path(sys.argv[1]).resolve(), read_config("".join(sys.argv[2:3])))
    asyncio.run(serve(tasks, answers))


if __name__ == "__main__":
    main()
