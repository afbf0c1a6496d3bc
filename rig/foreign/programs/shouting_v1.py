"""A verifiers taskset: the answer is right if it is in capitals. Its harness makes two model calls, one streamed."""

from typing import Any

import httpx
import verifiers.v1 as vf
from verifiers.v1.runtimes import ProgramResult

WORDS = ("one", "two")


class ShoutingTask(vf.Task):  # type: ignore[misc]
    @vf.reward  # type: ignore[untyped-decorator]
    async def shouts(self, trace: Any) -> float:
        return float(trace.last_reply.isupper())


class ShoutingTaskset(vf.Taskset[ShoutingTask, vf.TasksetConfig]):  # type: ignore[misc]
    def load(self) -> Any:
        for word in WORDS:
            yield ShoutingTask(vf.TaskData(prompt=f"Say {word} aloud", name=word), self.config.task)


class ShoutingHarness(vf.Harness[vf.HarnessConfig]):  # type: ignore[misc]
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self, ctx: Any, trace: Any, runtime: Any, endpoint: str, secret: str, mcp_urls: Any, data: Any
    ) -> ProgramResult:
        messages = [{"role": "user", "content": data.prompt}]
        async with httpx.AsyncClient(headers={"Authorization": f"Bearer {secret}"}, timeout=60) as http:
            for stream in (True, False):
                body = {"model": ctx.model, "messages": messages, "max_tokens": 16, "stream": stream}
                answer = await http.post(f"{endpoint}/chat/completions", json=body)
                if answer.status_code != 200:
                    return ProgramResult(1, "", answer.text)
        return ProgramResult(0, "", "")


__all__ = ["ShoutingHarness", "ShoutingTaskset"]
