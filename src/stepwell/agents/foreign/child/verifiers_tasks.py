"""Tasks of a verifiers taskset (verifiers 0.4), each run as an episode of its environment.

    python verifiers_tasks.py TASKSET_ID [CONFIG.json]

The config may have `env` (verifiers' own table: harness, runtime, timeouts), `sampling`, and `limit`, the number of
tasks.
"""

import asyncio
import os
import sys
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any

from task_server import INFRASTRUCTURE, failed, read_config, require, serve, take_stdout

OF_THE_POLICY = ("HarnessError", "TaskError")
"""Errors that what the model wrote may cause: the harness, or the code that scores it, could not use it."""
CONTENT_STATUSES = (400, 413, 422)
"""Refusals of a model call that its content causes."""


class VerifiersTasks:
    def __init__(self, taskset: str, config: dict[str, Any]) -> None:
        from verifiers.v1.types import SamplingConfig
        from verifiers.v1.utils.loaders import load_environment, resolve_env_config

        env = dict(config.get("env", {}))
        env["taskset"] = {**env.get("taskset", {}), "id": taskset}
        self._env = load_environment(resolve_env_config(env))
        tasks = self._env.taskset
        if "limit" in config:
            tasks = tasks.take(config["limit"])
        if not tasks.bounded:
            raise SystemExit(f"{taskset} has tasks without end: set limit in --config")
        self._tasks = list(tasks)
        self._sampling = SamplingConfig(**config.get("sampling", {}))
        self.names: Sequence[str] = [
            str(task.data.name or task.data.id or place) for place, task in enumerate(self._tasks)
        ]

    def serving(self) -> AbstractAsyncContextManager[Any]:
        return self._env.serving()  # type: ignore[no-any-return]

    async def run(self, asked: dict[str, Any]) -> dict[str, Any]:
        from verifiers.v1.clients import EvalClientConfig, ModelContext

        variable = f"STEPWELL_ROLLOUT_KEY_{asked['id']}"  # verifiers takes a key by the name of a variable
        os.environ[variable] = asked["api_key"]
        try:
            client = EvalClientConfig(base_url=asked["base_url"], api_key_var=variable)
            context = ModelContext(model=asked["model"], client=client, sampling=self._sampling)
            episode = await self._env.run_episode(self._tasks[asked["task"]], context)
        finally:
            del os.environ[variable]
        return _told(episode)


def _told(episode: Any) -> dict[str, Any]:
    trained = [trace for trace in episode.traces if trace.agent.trainable]
    if episode.ok and trained:
        return {"reward": sum(trace.reward for trace in trained) / len(trained)}
    errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
    why = f"{errors[-1].type}: {errors[-1].message}" if errors else "the episode failed without an error"
    if episode.is_timeout or any(trace.is_timeout for trace in episode.traces):
        return failed("too_long", why)
    is_policys = errors and (errors[-1].type in OF_THE_POLICY or errors[-1].status_code in CONTENT_STATUSES)
    return failed("error" if is_policys else INFRASTRUCTURE, why)


def main() -> None:
    answers = take_stdout()
    require("verifiers")
    tasks = VerifiersTasks(sys.argv[1], read_config("".join(sys.argv[2:3])))
    asyncio.run(serve(tasks, answers))


if __name__ == "__main__":
    main()
