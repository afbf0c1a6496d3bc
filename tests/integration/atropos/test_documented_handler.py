"""The life of a rollout handler as Atropos' document draws it: every call, the two states, and the W&B run."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import wandb

from rig.atropos.server import TRAINER, scored_group
from rig.wandb_runs import wandb_history

OFF_POLICY_TOLERANCE = 3
PAUSES = 2
"""The handler's life ends when it has paused and resumed so often."""
RUNNING, PAUSED = "Running", "Paused"


@contextmanager
def offline_run(folder: Path, *, name: str, group: str, project: str) -> Iterator[Any]:
    settings = wandb.Settings(silent=True)
    run = wandb.init(mode="offline", dir=str(folder), settings=settings, name=name, group=group, project=project)
    try:
        yield run
    finally:
        run.finish()


class Handler:
    """Pauses above `off_policy_tolerance * batch_size` waiting sequences, and logs what it does."""

    def __init__(self, client: httpx.AsyncClient, env_id: int, run: Any) -> None:
        self.client, self.env_id, self.run = client, env_id, run
        self.threshold = OFF_POLICY_TOLERANCE * TRAINER["batch_size"]
        self.state = RUNNING
        self.sent = 0
        self.events: list[str] = []
        self.steps: list[int] = []

    async def turn(self) -> None:
        if self.state == RUNNING:
            await self.send()
        status = (await self.client.request("GET", "/status-env", json={"env_id": self.env_id})).json()
        assert status.keys() >= {"current_step", "queue_size", "env_weight"}
        self.steps.append(status["current_step"])
        self.run.log({"queue_size": status["queue_size"]})
        state = PAUSED if status["queue_size"] > self.threshold else RUNNING
        if state != self.state:
            self.state = state
            self.events.append(state)
            self.run.log({f"events/{state}": status["queue_size"]})

    async def send(self) -> None:
        """One group, then a list of two, by turns."""
        groups = [scored_group(self.sent + n, env_id=self.env_id) for n in range(1 + self.sent % 2)]
        path, body = ("/scored_data", groups[0]) if len(groups) == 1 else ("/scored_data_list", groups)
        answer = (await self.client.post(path, json=body)).json()
        assert answer["status"] == "received"
        self.sent += len(groups)
        self.run.log({"env/reward": 0.5, "env/length": 4})


async def test_the_documented_loop_of_a_rollout_handler_runs_to_its_end(
    client: httpx.AsyncClient, tmp_path: Path
) -> None:
    await client.post("/register", json=TRAINER)
    await client.get("/batch")
    about = {"max_token_length": 64, "desired_name": "sums", "weight": 1.0, "group_size": 2}
    registered, twin = [(await client.post("/register-env", json=about)).json() for _ in range(2)]
    assert registered.keys() >= {"env_id", "starting_step", "wandb_name"}
    assert registered["wandb_name"] != twin["wandb_name"]

    info = (await client.get("/wandb_info")).json()
    assert info == {"group": TRAINER["wandb_group"], "project": TRAINER["wandb_project"]}
    with offline_run(tmp_path, name=registered["wandb_name"], **info) as run:
        assert (run.name, run.group, run.project) == (registered["wandb_name"], "group", "project")
        handler, taken = Handler(client, registered["env_id"], run), 0
        while handler.events.count(RUNNING) < PAUSES:
            assert handler.sent < 100, "it never paused"
            await handler.turn()
            if handler.state == PAUSED:  # the trainer catches up, and nothing is sent meanwhile
                sent = handler.sent
                taken += len((await client.get("/batch")).json()["batch"])
                await handler.turn()
                assert handler.sent == sent
        left = (await client.post("/disconnect-env", json={"env_id": registered["env_id"]})).json()
        assert left["status"] == "success"

    assert handler.events == [PAUSED, RUNNING] * PAUSES
    assert taken >= PAUSES
    assert handler.steps == sorted(handler.steps)
    assert handler.steps[-1] > handler.steps[0]
    history = wandb_history(tmp_path)
    logged = {key for row in history for key in row}
    assert logged >= {"env/reward", "env/length", "queue_size", "events/Paused", "events/Running"}
    assert all(row["events/Paused"] > handler.threshold for row in history if "events/Paused" in row)
