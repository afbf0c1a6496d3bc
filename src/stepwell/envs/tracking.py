"""The log of an environment: rollouts, lengths, durations and evaluations. Its methods are hooks that authors override.

The names of metrics and attributes are Atropos', so that dashboards and subclasses written for it go on.
"""

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from stepwell.envs.config import BaseEnvConfig
from stepwell.envs.scored_data import Item, ScoredDataGroup

log = logging.getLogger("stepwell.envs")

DURATIONS = {
    "task_duration": "train_perf/task_duration",
    "succeeded_task_duration": "train_perf/succeeded_task_duration",
    "failed_task_duration": "train_perf/failed_task_duration",
    "mainloop_timings": "train_perf/mainloop_timings",
    "workers_added_list": "train_perf/workers_added_per_attempt",
}
"""Attributes with a number per event, and their metrics."""


class EnvTracking:
    name: str
    config: BaseEnvConfig
    tokenizer: Any

    def __init__(self, config: BaseEnvConfig) -> None:
        self.config = config
        self.curr_step = 0
        """The trainer's step."""
        self.groups_delivered = 0
        """Groups sent, or written."""
        self.failure_count = FailureCount()
        self.wandb = WandbTracker()
        self.wandb_prepend: str | None = None
        """The environment's name at the rollout server; it begins the names of all metrics."""
        self.max_token_len = -1
        """The longest sequence that the trainer accepts; -1 before it is known, or without a limit."""
        self.rollouts_for_wandb: list[Any] = []
        """One entry per group, for the next table."""
        self.completion_lengths: list[int] = []
        """Trained tokens of each rollout since the last log."""
        self.task_duration: list[float] = []
        """Seconds that items took since the last log; the same for items that gave groups, and for the others."""
        self.succeeded_task_duration: list[float] = []
        self.failed_task_duration: list[float] = []
        self.mainloop_timings: list[float] = []
        self.workers_added_list: list[float] = []

    async def add_rollouts_for_wandb(self, scored_data: ScoredDataGroup, item: Item = None) -> None:
        """Called with each group that is sent: keeps texts and scores for the next table."""
        if self.wandb.is_on:
            count = self.config.num_rollouts_per_group_for_logging
            kept = list(zip(scored_data["tokens"], scored_data["scores"], strict=True))[
                : None if count == -1 else count
            ]
            texts = await asyncio.to_thread(lambda: [str(self.tokenizer.decode(tokens)) for tokens, _ in kept])
            self.rollouts_for_wandb.append([(text, score) for text, (_, score) in zip(texts, kept, strict=True)])
            del self.rollouts_for_wandb[: -self.config.num_rollouts_to_keep or None]

    async def create_rollout_table(self, wandb_metrics: dict[str, Any]) -> dict[str, Any]:
        """Called by wandb_log: adds the table of rollouts_for_wandb to the metrics."""
        rows = [row for group in self.rollouts_for_wandb for row in group]
        return {**wandb_metrics, TABLE: RolloutTable(("text", "score"), rows)} if rows else wandb_metrics

    def perf_stats(self, metrics_dict: dict[str, Any]) -> dict[str, Any]:
        """Called by wandb_log: adds durations and numbers of workers to the metrics, and starts their lists anew."""
        for attribute, metric in DURATIONS.items():
            values: list[float] = vars(self)[attribute]
            if len(values) > 1:
                metrics_dict |= _spread(metric, values)
                vars(self)[attribute] = []
        return metrics_dict

    async def wandb_log(self, wandb_metrics: Mapping[str, Any] | None = None) -> None:
        """Called after training steps and evaluations. A subclass adds its metrics and calls this method last."""
        metrics: dict[str, Any] = {"train/groups_sent": self.groups_delivered, **(wandb_metrics or {})}
        metrics |= {f"dropped/{cause.replace(' ', '_')}": n for cause, n in self.failure_count.dropped.items()}
        if self.completion_lengths:
            lengths = _spread("train/completion_lengths", self.completion_lengths)
            lengths["train/completion_lengths"] = lengths.pop("train/completion_lengths_mean")
            long = np.array(self.completion_lengths) > 0.95 * self.max_token_len
            metrics |= {**lengths, "train/completion_lengths_p95": float(long.mean())}
        metrics = self.perf_stats(await self.create_rollout_table(metrics))
        self.rollouts_for_wandb, self.completion_lengths = [], []
        self.log_to_wandb(metrics)
        self.wandb.log(await self.server_metrics(), self.curr_step)  # without a name: environments share servers

    async def server_metrics(self) -> dict[str, Any]:
        """Called by wandb_log: the metrics of the servers."""
        return {}

    def log_to_wandb(self, metrics: Mapping[str, Any]) -> None:
        """Logs exactly these metrics at the trainer's step, with the environment's name before theirs."""
        prefix = f"{self.wandb_prepend}_" if self.wandb_prepend else ""
        self.wandb.log({f"{prefix}{name}": value for name, value in metrics.items()}, self.curr_step)

    async def evaluate_log(
        self,
        metrics: Mapping[str, Any],
        task_name: str | None = None,
        model_name: str | None = None,
        start_time: float | None = None,
        end_time: float | None = None,
        generation_parameters: Mapping[str, Any] | None = None,
        samples: Sequence[Mapping[str, Any]] | None = None,
        verbose: bool = True,
    ) -> None:
        """Writes metrics.json, and samples.jsonl if there are samples, to config.data_dir_to_save_evals."""
        if self.config.data_dir_to_save_evals is None:
            log.warning("an evaluation is not saved: data_dir_to_save_evals is not set")
            return
        task = task_name or f"{self.name}_eval"
        end = time.time() if end_time is None else end_time
        folder = Path(self.config.data_dir_to_save_evals)
        await asyncio.to_thread(
            write_evaluation,
            folder,
            metrics,
            task=task,
            model_name=model_name,
            seconds=end - (end if start_time is None else start_time),
            generation_parameters={"max_new_tokens": self.config.max_token_length, **(generation_parameters or {})},
            samples=samples or (),
        )
        if verbose:
            log.info("evaluation %s: %s; saved in %s", task, dict(metrics), folder)


def _spread(name: str, values: Sequence[float]) -> dict[str, float]:
    own = np.array(values, np.float64)
    statistics = {"mean": own.mean(), "std": own.std(), "max": own.max(), "min": own.min()}
    return {f"{name}_{statistic}": float(value) for statistic, value in statistics.items()}
