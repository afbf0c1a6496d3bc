"""TeacherDistillationEnv: adds a teacher's log-probabilities of each token to the groups that are sent.

- The teacher is a server of its own: `--teacher.base-url`, `teacher:` in the file, or teacher_config_init.
- Teacher and student have the same tokens; other tokenizers are refused at the start.
- A group is sent without the teacher's part if the teacher does not answer for one of its rollouts; the log says so.
"""

import asyncio
import logging
from collections.abc import Sequence
from typing import Any, ClassVar, Self

from pydantic import Field

from stepwell.common.tokenizers import load_tokenizer
from stepwell.envs.base import BaseEnv
from stepwell.envs.config import (
    APIServerConfig,
    BaseEnvConfig,
    EnvFlags,
    EnvSettings,
    ProcessFlags,
    ServerBaseline,
    as_server_configs,
)
from stepwell.envs.scored_data import Groups, Item, ScoredDataGroup, as_list
from stepwell.envs.servers import ServerManager
from stepwell.errors import BadRequest

log = logging.getLogger("stepwell.envs")

TeacherServers = ServerBaseline | Sequence[APIServerConfig]


class TeacherDistillationConfig(BaseEnvConfig):
    teacher_enabled: bool = False
    """Add the teacher's log-probabilities to the groups."""
    teacher_top_k: int = Field(default=0, ge=-1)
    """Most probable tokens of the teacher at each position, beside the token itself; -1 asks for nothing."""


class TeacherFlags(EnvFlags):
    teacher: APIServerConfig | None = None
    """The server of the teacher."""
    in_file: ClassVar[tuple[str, ...]] = (*EnvFlags.in_file, "teacher")


class TeacherProcessFlags(ProcessFlags, TeacherFlags):
    pass


class TeacherDistillationEnv(BaseEnv):
    env_config_cls = TeacherDistillationConfig
    config: TeacherDistillationConfig

    def __init__(
        self,
        config: TeacherDistillationConfig,
        server_configs: ServerBaseline | Sequence[APIServerConfig],
        teacher_server_configs: TeacherServers | None = None,
        slurm: bool = False,
        testing: bool = False,
    ) -> None:
        super().__init__(config, server_configs, slurm, testing)
        self.teacher_server: ServerManager | None = None
        if config.teacher_enabled:
            if teacher_server_configs is None:
                raise BadRequest(
                    "teacher_enabled needs a teacher: --teacher.base-url with its model-name, or `teacher:` in the file"
                )
            teachers = as_server_configs(teacher_server_configs)
            self._check_vocabulary(teachers[0])
            self.teacher_server = ServerManager(teachers)

    @classmethod
    def teacher_config_init(cls) -> TeacherServers | None:
        """The defaults of the teacher's server."""
        return None

    @classmethod
    def from_settings(cls, settings: EnvSettings) -> Self:
        teachers, given = cls.teacher_config_init(), getattr(settings.flags, "teacher", None)
        if given is not None:
            changes = given.model_dump(exclude_unset=True)
            bases = [given] if teachers is None else as_server_configs(teachers)
            teachers = [base.model_copy(update=changes) for base in bases]
        return cls(settings.env, settings.servers, teachers)  # type: ignore[arg-type]

    @classmethod
    def get_cli_serve_config_cls(cls) -> type[EnvFlags]:
        return TeacherFlags.with_defaults(*cls.config_init())

    @classmethod
    def get_cli_process_config_cls(cls) -> type[EnvFlags]:
        return TeacherProcessFlags.with_defaults(*cls.config_init())

    async def handle_send_to_api(
        self,
        scored_data: Groups,
        item: Item = None,
        do_send_to_api: bool = True,
        abort_on_any_max_length_exceeded: bool = True,
    ) -> None:
        for group in as_list(scored_data):
            await self._add_teacher(group)
        await super().handle_send_to_api(scored_data, item, do_send_to_api, abort_on_any_max_length_exceeded)

    async def close_servers(self) -> None:
        await super().close_servers()
        if self.teacher_server is not None:
            await self.teacher_server.close()

    async def _add_teacher(self, group: ScoredDataGroup) -> None:
        overrides = group.get("group_overrides") or {}
        top_k = int(overrides.get("teacher_top_k", self.config.teacher_top_k))
        if self.teacher_server is None or top_k < 0 or overrides.get("skip_teacher_top_k"):
            return
        asked = (self.teacher_server.get_logprobs(input_ids=tokens, top_k=top_k) for tokens in group["tokens"])
        answers = await asyncio.gather(*asked, return_exceptions=True)
        for answer in answers:
            if isinstance(answer, BaseException):
                log.warning("a group is sent without the teacher's log-probabilities: %s", answer)
                return
        scored: list[dict[str, Any]] = answers  # type: ignore[assignment]
        group["distill_token_ids"] = [each["prompt_topk_token_ids"] for each in scored]
        group["distill_logprobs"] = [each["prompt_topk_logprobs"] for each in scored]

    def _check_vocabulary(self, teacher: APIServerConfig) -> None:
        name = teacher.tokenizer_name or teacher.model_name
        if name != getattr(self.tokenizer, "name_or_path", "") and (
            load_tokenizer(name).get_vocab() != self.tokenizer.get_vocab()
        ):
            raise BadRequest(f"the teacher's tokenizer {name} has other tokens than the environment's")
