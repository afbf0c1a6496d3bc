"""A Harbor agent: asks the model once, and runs its answer as a shell command in the environment."""

from typing import Any

import httpx
from harbor.agents.base import BaseAgent


class ShellAgent(BaseAgent):  # type: ignore[misc]
    @staticmethod
    def name() -> str:
        return "shell"

    def version(self) -> str:
        return "1"

    async def setup(self, environment: Any) -> None:
        pass

    async def run(self, instruction: str, environment: Any, context: Any) -> None:
        env = self.extra_env
        model = self.model_name.removeprefix("openai/")
        body = {"model": model, "messages": [{"role": "user", "content": instruction}], "max_tokens": 64}
        async with httpx.AsyncClient(headers={"Authorization": f"Bearer {env['OPENAI_API_KEY']}"}, timeout=60) as http:
            answer = await http.post(f"{env['OPENAI_BASE_URL']}/chat/completions", json=body)
        answer.raise_for_status()
        await environment.exec(answer.json()["choices"][0]["message"]["content"])
