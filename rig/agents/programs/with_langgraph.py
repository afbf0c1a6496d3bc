"""An agent of LangChain's, which is a LangGraph with one tool, run by the interpreter of the agents' environment."""

import os
import sys
from pathlib import Path

from langchain.agents import create_agent
from langchain_openai import ChatOpenAI


def read_file(path: str) -> str:
    """Read a text file."""
    return Path(path).read_text()


def main() -> None:
    model = ChatOpenAI(
        model=os.environ["MODEL"],
        base_url=os.environ["BASE_URL"],
        api_key=os.environ["API_KEY"],
        use_responses_api=False,
    )
    agent = create_agent(model, [read_file])
    said = agent.invoke({"messages": [{"role": "user", "content": os.environ["PROMPT"]}]})
    sys.stdout.write(said["messages"][-1].content)


if __name__ == "__main__":
    main()
