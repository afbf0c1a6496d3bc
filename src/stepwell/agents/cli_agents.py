"""Ready agents for BlackBoxAgentFlow: the harnesses that people run on the command line, unmodified.

    flow = BlackBoxAgentFlow(url, ClaudeCode(prompt=lambda s: s["task"], prepare=check_out, reward=tests_pass))

- A harness finds its trajectory by environment variables and by configuration files in its HOME.
- Each rollout has its own HOME, working folder and TMPDIR. When it ends, however it ends, all processes of the harness
  are killed (on Linux also those that it has detached), and the folders are deleted.
- A harness gets no variables of this process but those that every program needs.
- It uses its tools without asking anyone: it does what the model says, with the rights of this process.
"""

import asyncio
import json
import shutil
import tempfile
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, TypeAlias
from uuid import uuid4

from stepwell.agents.rollout import Rollout, Sample
from stepwell.common.async_calls import call, run_to_end
from stepwell.common.processes import kill_marked, plain_environment, run_command

MakePrompt: TypeAlias = Callable[[Sample], str]
PrepareFolder: TypeAlias = Callable[[Sample, Path], None] | Callable[[Sample, Path], Awaitable[None]]
RewardFolder: TypeAlias = (
    Callable[[Sample, str, Path], float | None] | Callable[[Sample, str, Path], Awaitable[float | None]]
)
PROVIDER = "stepwell"
"""The name of the gateway in configuration files."""
KEY_VARIABLE = "STEPWELL_TRAJECTORY_KEY"
RUN_VARIABLE = "STEPWELL_HARNESS_RUN"
"""Marks the processes of one run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelAccess:
    """All that a harness is told about the model."""

    base_url: str
    """The base URL, which ends in /v1."""
    api_key: str = field(repr=False)
    model: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Invocation:
    """How a harness is started for one prompt."""

    arguments: Sequence[str]
    env: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)
    """Configuration files by their path in HOME."""
    stdin: str = ""


class CommandLineHarness(ABC):
    """A program that works on a prompt in a folder and writes its answer to stdout."""

    package: ClassVar[str]
    """The name of the package at npm."""
    program: ClassVar[str]
    """The name of the program, found in PATH."""

    def __init__(
        self,
        prompt: MakePrompt,
        prepare: PrepareFolder | None = None,
        reward: RewardFolder | None = None,
        *,
        program: str | None = None,
        arguments: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
    ) -> None:
        """`prepare` fills the empty working folder of a rollout. `reward` gets the sample, the answer and the folder.
        `program` is the path of a harness that is not in PATH; `arguments` and `env` are added to its own."""
        self._prompt = prompt
        self._prepare = prepare
        self._reward = reward
        self._program = program or self.program
        self._arguments = arguments
        self._env = env or {}

    async def __call__(self, rollout: Rollout) -> float | None:
        access = ModelAccess(base_url=rollout.base_url, api_key=rollout.api_key, model=await rollout.model())
        async with _private_folder() as folder:
            (home := folder / "home").mkdir()
            (workdir := folder / "work").mkdir()
            if self._prepare is not None:
                await call(self._prepare, rollout.sample, workdir)
            answer = await self.run(access, self._prompt(rollout.sample), workdir=workdir, home=home)
            return None if self._reward is None else await call(self._reward, rollout.sample, answer, workdir)

    async def run(self, access: ModelAccess, prompt: str, *, workdir: Path, home: Path) -> str:
        """The answer to one prompt. CommandFailed if the harness fails."""
        made = self.invocation(access, prompt, workdir)
        (temporary := home.parent / f"{home.name}-tmp").mkdir(exist_ok=True)
        for name, text in made.files.items():
            (path := home / name).parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        told = {"HOME": str(home), "TMPDIR": str(temporary), RUN_VARIABLE: (run := uuid4().hex)}
        try:
            return await run_command(
                [self._program, *made.arguments, *self._arguments],
                env={**plain_environment(), **told, **made.env, **self._env},
                stdin=made.stdin.encode(),
                cwd=workdir,
            )
        finally:
            await run_to_end(asyncio.to_thread(kill_marked, RUN_VARIABLE, run))

    @abstractmethod
    def invocation(self, access: ModelAccess, prompt: str, workdir: Path) -> Invocation: ...


class ClaudeCode(CommandLineHarness):
    """Anthropic's Claude Code, over the Messages API."""

    package, program = "@anthropic-ai/claude-code", "claude"
    tools: ClassVar[Sequence[str]] = ("Bash", "Edit", "NotebookEdit", "Read", "Write")
    """Used without asking; where nobody can be asked, others that need a permission are refused."""

    def invocation(self, access: ModelAccess, prompt: str, workdir: Path) -> Invocation:
        models = ("ANTHROPIC_MODEL", "ANTHROPIC_DEFAULT_HAIKU_MODEL")
        return Invocation(
            arguments=["-p"],
            env={
                "ANTHROPIC_BASE_URL": access.base_url.removesuffix("/v1"),
                "ANTHROPIC_API_KEY": access.api_key,
                "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
                **dict.fromkeys(models, access.model),
            },
            files={".claude/settings.json": json.dumps({"permissions": {"allow": self.tools}})},
            stdin=prompt,
        )


class Codex(CommandLineHarness):
    """OpenAI's Codex, over the Responses API."""

    package, program = "@openai/codex", "codex"

    def invocation(self, access: ModelAccess, prompt: str, workdir: Path) -> Invocation:
        provider = {
            "name": PROVIDER,
            "base_url": access.base_url,
            "env_key": KEY_VARIABLE,
            "wire_api": "responses",
        }
        settings = {
            "model": access.model,
            "model_provider": PROVIDER,
            "approval_policy": "never",
            "sandbox_mode": "danger-full-access",
        }
        lines = [*_toml(settings), f"[model_providers.{PROVIDER}]", *_toml(provider)]
        return Invocation(
            arguments=["exec", "--skip-git-repo-check", "-"],
            env={KEY_VARIABLE: access.api_key},
            files={".codex/config.toml": "\n".join(lines)},
            stdin=prompt,
        )


class OpenClaw(CommandLineHarness):
    """OpenClaw, one task without its gateway and channels, over the chat API."""

    package, program = "openclaw", "openclaw"
    tools: ClassVar[Sequence[str]] = ("apply_patch", "edit", "exec", "ls", "read", "write")
    """Offered to the model. With `process` or `sessions_spawn` it would end each prompt in a message about running
    processes and sub-agents that the next prompt does not have, so that turns would not join."""

    def invocation(self, access: ModelAccess, prompt: str, workdir: Path) -> Invocation:
        provider = {
            "baseUrl": access.base_url,
            "apiKey": access.api_key,
            "api": "openai-completions",
            "models": [{"id": access.model, "name": access.model}],
        }
        settings = {
            "models": {"mode": "replace", "providers": {PROVIDER: provider}, "catalogRefresh": {"enabled": False}},
            "agents": {"defaults": {"model": {"primary": f"{PROVIDER}/{access.model}"}}},
            "tools": {"allow": self.tools, "toolSearch": False},
        }
        return Invocation(
            arguments=["agent", "exec", "--message-file", "-", "--code-mode", "direct", "--timeout", "0"],
            env={
                "OPENCLAW_NO_RESPAWN": "1",  # otherwise it runs in a session of its own
                "OPENCLAW_NO_AUTO_UPDATE": "1",
                "OPENCLAW_OFFLINE": "1",
                "OPENCLAW_LOG_LEVEL": "silent",  # of a file in /tmp
            },
            files={".openclaw/openclaw.json": json.dumps(settings)},
            stdin=prompt,
        )


class Opencode(CommandLineHarness):
    """opencode, over the chat API."""

    package, program = "opencode-ai", "opencode"

    def invocation(self, access: ModelAccess, prompt: str, workdir: Path) -> Invocation:
        provider = {
            "npm": "@ai-sdk/openai-compatible",
            "options": {"baseURL": access.base_url, "apiKey": access.api_key},
            "models": {access.model: {}},
        }
        settings = {
            "autoupdate": False,
            "share": "disabled",
            "model": f"{PROVIDER}/{access.model}",
            "provider": {PROVIDER: provider},
        }
        return Invocation(
            arguments=["run"],
            env={"OPENCODE_DISABLE_MODELS_FETCH": "1"},
            files={".config/opencode/opencode.json": json.dumps(settings)},
            stdin=prompt,
        )


class QwenCode(CommandLineHarness):
    """qwen-code, over the chat API."""

    package, program = "@qwen-code/qwen-code", "qwen"

    def invocation(self, access: ModelAccess, prompt: str, workdir: Path) -> Invocation:
        settings = {
            "privacy": {"usageStatisticsEnabled": False},
            "telemetry": {"enabled": False},
            "general": {"enableAutoUpdate": False},
            "security": {"auth": {"selectedType": "openai"}},
        }
        return Invocation(
            arguments=["--approval-mode", "yolo"],
            env={
                "OPENAI_BASE_URL": access.base_url,
                "OPENAI_API_KEY": access.api_key,
                "OPENAI_MODEL": access.model,
            },
            files={".qwen/settings.json": json.dumps(settings)},
            stdin=prompt,
        )


HARNESSES: Mapping[str, type[CommandLineHarness]] = {
    "claude-code": ClaudeCode,
    "codex": Codex,
    "openclaw": OpenClaw,
    "opencode": Opencode,
    "qwen-code": QwenCode,
}


@asynccontextmanager
async def _private_folder() -> AsyncIterator[Path]:
    """A folder that only this user can read; deleted with all that is in it, also if the rollout is cancelled."""
    folder = Path(tempfile.mkdtemp(prefix="stepwell-harness-"))
    try:
        yield folder
    finally:
        await run_to_end(asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True))


def _toml(settings: Mapping[str, str]) -> list[str]:
    """JSON strings are TOML strings."""
    return [f"{name} = {json.dumps(value)}" for name, value in settings.items()]
