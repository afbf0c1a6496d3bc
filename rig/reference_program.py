"""The program behind `reference_logprobs`: a question as JSON on stdin, a list of numbers as stdout's last line.

It runs in vLLM's environment and so imports nothing of this checkout.
"""

import json
import sys

import torch
from transformers import AutoModelForCausalLM


def main() -> None:
    question = json.load(sys.stdin)
    prompt_ids, reply_ids = question["prompt_ids"], question["reply_ids"]
    model = AutoModelForCausalLM.from_pretrained(question["model"], dtype=torch.float32)
    with torch.inference_mode():
        logits = model(torch.tensor([prompt_ids + reply_ids])).logits[0]
    before_each = logits[len(prompt_ids) - 1 : -1].log_softmax(-1)
    chosen = before_each.gather(1, torch.tensor(reply_ids)[:, None])[:, 0]
    sys.stdout.write("\n" + json.dumps(chosen.tolist()) + "\n")


if __name__ == "__main__":
    main()
