"""A trainer of Atropos: it registers, then asks for batches. Where yours takes an optimizer step, this one prints."""

import os
import time

import requests

STEPS = 3

server, url = requests.Session(), f"{os.environ['STEPWELL_URL']}/atropos"
server.headers["Authorization"] = f"Bearer {os.environ['STEPWELL_KEY']}"
name = f"run-{time.time():.0f}"  # a trainer that registers the same again continues its run
run = {"wandb_group": name, "wandb_project": "examples", "checkpoint_dir": "checkpoints"}
size = {"batch_size": 8, "max_token_len": 512, "num_steps": STEPS, "starting_step": 0, "save_checkpoint_interval": 0}
server.post(f"{url}/register", json={**run, **size}).raise_for_status()
for step in range(1, STEPS + 1):
    while (batch := server.get(f"{url}/batch").json()["batch"]) is None:
        time.sleep(0.2)
    scores = [score for group in batch for score in group["scores"]]
    trained = sum(token != -100 for group in batch for mask in group["masks"] for token in mask)
    print(f"step {step}: {len(batch)} groups, mean score {sum(scores) / len(scores):.2f}, {trained} trained tokens")
