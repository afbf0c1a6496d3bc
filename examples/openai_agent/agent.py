"""An agent with a tool, written with OpenAI's SDK: four attempts at each question."""

import json
import os
from typing import Any

from openai import OpenAI

import stepwell

QUESTIONS = {"What is 12 * 34?": 408, "What is 27 * 19?": 513}
MULTIPLY: Any = {
    "type": "function",
    "function": {
        "name": "multiply",
        "description": "The product of two whole numbers.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
        },
    },
}


def multiply(arguments: str) -> str:
    try:
        given = json.loads(arguments)
        return str(given["a"] * given["b"])
    except (ValueError, KeyError, TypeError) as failure:
        return f"error: {failure!r}"  # the model reads it, and can try again


def answer(client: OpenAI, question: str) -> str:
    messages: list[Any] = [{"role": "user", "content": question}]
    for _ in range(4):
        reply = client.chat.completions.create(model="default", messages=messages, tools=[MULTIPLY], max_tokens=512)
        said: Any = reply.choices[0].message
        if not said.tool_calls:
            return said.content or ""
        messages.append(said)
        for call in said.tool_calls:
            result = multiply(call.function.arguments)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    return ""


def main() -> None:
    run = stepwell.connect(os.environ["STEPWELL_URL"], key=os.environ["STEPWELL_KEY"])
    for question, product in QUESTIONS.items():
        for _ in range(4):
            with run.trajectory(prompt_uid=f"product-{product}", group_size=4) as t:
                text = answer(OpenAI(base_url=t.base_url, api_key=t.api_key), question)
                t.reward = float(str(product) in text)
            print(f"{question}  reward {t.reward}  {text}")


if __name__ == "__main__":
    main()
