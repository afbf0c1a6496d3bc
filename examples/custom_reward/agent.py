"""An agent that writes a function and gives no reward: reward workers do. At the end, what a trainer gets."""

import os
from typing import Any

from openai import OpenAI

import stepwell
from stepwell.pool.client import connect

CHANNEL = "functions"
TASK = "Write a Python function median(numbers) in a fenced block. The median of an even count is the mean of two."
TESTS = {
    "odd": "assert median([5, 1, 9]) == 5",
    "even": "assert median([4, 1, 3, 2]) == 2.5",
}


def main() -> None:
    run = stepwell.connect(os.environ["STEPWELL_URL"], key=os.environ["STEPWELL_KEY"])
    for _ in range(4):
        with run.trajectory(prompt_uid="median", channel=CHANNEL, group_size=4, metadata={"tests": TESTS}) as t:
            agent = OpenAI(base_url=t.base_url, api_key=t.api_key)
            messages: list[Any] = [{"role": "user", "content": TASK}]
            agent.chat.completions.create(model="default", messages=messages, max_tokens=1024)

    pool = connect("data_pool")
    batch = pool.fetch_batch(1, channel=CHANNEL, lease=60.0)  # waits until all four have a reward
    for (step,) in batch.groups()[0]:
        given: Any = step.metadata["reward"]
        print(f"reward {step.reward}  {given['parts']}  {given.get('notes', '')}".rstrip())
    pool.nack(batch)  # only looked at: the trainer still gets it


if __name__ == "__main__":
    main()
