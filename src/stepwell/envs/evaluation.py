"""Evaluations that are not environments: EvalBase asks a server about each item of its data and averages the metrics.

The results have the form of BaseEnv.evaluate_log.
"""

import asyncio
import logging
import math
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stepwell.common.command_line import FlagParser, failing, with_dashes
from stepwell.envs.config import APIServerConfig
from stepwell.envs.servers import ServerManager
from stepwell.envs.tracking import write_evaluation

if TYPE_CHECKING:
    from openai.types.chat import ChatCompletion

log = logging.getLogger("stepwell.envs")


class EvalBase(ABC):
    """A subclass says what its data is, and how one item of it is asked and scored."""

    def __init__(self, pass_at_n: int = 1, pass_at_n_samples: int = 1, **attributes: Any) -> None:
        """`attributes` are set on the evaluation: temperature, top_p, max_tokens, eval_dir, verbose and its own."""
        self.pass_at_n, self.pass_at_n_samples = pass_at_n, pass_at_n_samples
        vars(self).update(attributes)
        self.data = self.setup_data()

    @abstractmethod
    def setup_data(self) -> list[Any]:
        """The items."""

    @abstractmethod
    async def run_item(self, server: ServerManager, data_item: Any) -> tuple[dict[str, float], Any]:
        """The item's metrics, and its samples."""

    def get_generation_params(self) -> dict[str, Any]:
        n = max(self.pass_at_n, self.pass_at_n_samples)
        defaults = {"temperature": 0.0, "top_p": 1.0, "max_tokens": -1}
        return {"n": n, **{name: getattr(self, name, default) for name, default in defaults.items()}}

    async def chat_completion(self, server: ServerManager, messages: list[dict[str, Any]]) -> "ChatCompletion":
        return await server.chat_completion(messages=messages, **self.get_generation_params())

    async def __call__(self, server_manager: ServerManager) -> dict[str, float]:
        """The mean of each metric."""
        began_at = time.time()
        results = await asyncio.gather(*(self.run_item(server_manager, item) for item in self.data))
        metrics = {
            name: sum(own[name] for own, _ in results) / len(results) for name in (results[0][0] if results else ())
        }
        name = f"{type(self).__name__}@{self.pass_at_n}"
        await asyncio.to_thread(
            evaluate_log,
            metrics,
            eval_dir=getattr(self, "eval_dir", None),
            task_name=name + (f":{self.pass_at_n_samples}" if self.pass_at_n_samples != self.pass_at_n else ""),
            model_name=server_manager.servers[0].config.model_name,
            start_time=began_at,
            generation_parameters=self.get_generation_params(),
            samples=[samples for _, samples in results],
        )
        return metrics


def pass_at_k(m: int, c: float, k: int) -> float:
    """The probability that k of m samples, of which c are right, contain a right one."""
    wrong = m - int(c)  # a sum of scores is a float
    return 1.0 if wrong < k else 1.0 - math.comb(wrong, k) / math.comb(m, k)


def evaluate_log(
    metrics: Mapping[str, Any],
    eval_dir: str | None = None,
    task_name: str | None = None,
    model_name: str | None = None,
    start_time: float | None = None,
    end_time: float | None = None,
    generation_parameters: Mapping[str, Any] | None = None,
    samples: Sequence[Any] | None = None,
    verbose: bool = True,
) -> None:
    """Writes metrics.json, and samples.jsonl if there are samples, to `eval_dir`."""
    if verbose:
        log.info("evaluation %s: %s", task_name, dict(metrics))
    if eval_dir is None:
        log.warning("an evaluation is not saved: eval_dir is not set")
        return
    end = time.time() if end_time is None else end_time
    write_evaluation(
        Path(eval_dir),
        metrics,
        task=str(task_name),
        model_name=model_name,
        seconds=end - (end if start_time is None else start_time),
        generation_parameters=generation_parameters or {},
        samples=samples or (),
    )


async def eval_runner(eval_env: EvalBase) -> dict[str, float]:
    """Evaluates against the server that the command line names."""
    program = Path(sys.argv[0]).name
    parser = FlagParser(program)
    parser.add_argument("--server-url", default="http://localhost:8000", help="address of the server, with its /v1")
    parser.add_argument("--model-name", default="default", help="name of the model in requests")
    with failing(program, status=2):
        flags = parser.parse_args(with_dashes(sys.argv[1:]))
    server = ServerManager([APIServerConfig(base_url=flags.server_url, model_name=flags.model_name)])
    try:
        return await eval_env(server)
    finally:
        await server.close()
