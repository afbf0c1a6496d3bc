"""GroupDelivery: checks a finished group, saves it if configured, and sends it.

A group is delivered, or it is dropped and counted under its cause.
"""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

from stepwell.envs.environment import RunnableEnv
from stepwell.envs.scored_data import ScoredDataGroup, append_group, group_fault

NOT_SENT = "not sent"

Send = Callable[[ScoredDataGroup], Awaitable[str]]
"""Returns an empty text if the group has arrived, else the reason why not."""


class GroupDelivery:
    def __init__(self, env: RunnableEnv, send: Send, *, max_length: int | None = None) -> None:
        self._env = env
        self._send = send
        self._max_length = max_length
        self._file_lock = asyncio.Lock()

    async def deliver(self, group: ScoredDataGroup) -> None:
        fault = group_fault(
            group,
            group_size=self._env.config.group_size,
            max_length=self._max_length,
            may_be_equal=not self._env.config.ensure_scores_are_not_same,
        )
        if fault is not None:
            self._env.failure_count.drop(*fault)
            return
        if self._env.config.include_messages and not group.get("messages"):
            group["messages"] = [[{"role": "user", "content": self._text(tokens)}] for tokens in group["tokens"]]
        await self._save(group)
        if await self._send(group):
            self._env.failure_count.drop(NOT_SENT)
        else:
            self._env.groups_delivered += 1

    async def _save(self, group: ScoredDataGroup) -> None:
        self._env.wandb.keep(group)
        if self._env.config.data_path_to_save_groups is not None:
            async with self._file_lock:
                await asyncio.to_thread(append_group, Path(self._env.config.data_path_to_save_groups), group)

    def _text(self, tokens: list[int]) -> str:
        return str(self._env.tokenizer.decode(tokens))
