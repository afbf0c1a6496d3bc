"""An agent of the `openai-agents` package with one tool, run by the interpreter of the agents' environment."""

import os
import sys
from pathlib import Path

from agents import (
    Agent,
    OpenAIChatCompletionsModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI


@function_tool
def read_file(path: str) -> str:
    """Read a text file."""
    return Path(path).read_text()


def main() -> None:
    set_tracing_disabled(True)
    client = AsyncOpenAI(base_url=os.environ["BASE_URL"], api_key=os.environ["API_KEY"])
    model = OpenAIChatCompletionsModel(model=os.environ["MODEL"], openai_client=client)
    agent = Agent(name="reader", instructions="Read what you are asked for.", model=model, tools=[read_file])
    sys.stdout.write(Runner.run_sync(agent, os.environ["PROMPT"]).final_output)


if __name__ == "__main__":
    main()
