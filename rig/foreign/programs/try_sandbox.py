"""Tries to get out of LocalSandbox: `python try_sandbox.py CHILD FOLDER PORT` prints what happened as JSON.

The folder has a file `secret`, which nothing inside may reach. Something listens on the port.
"""

import asyncio
import json
import sys
import time
from pathlib import Path
from typing import Any

CHILD, FOLDER, PORT = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
sys.path.insert(0, CHILD)

from harbor.models.task.config import EnvironmentConfig, NetworkMode, NetworkPolicy  # noqa: E402
from harbor.models.trial.paths import TrialPaths  # noqa: E402
from local_sandbox import LeadsOutside, LocalSandbox  # noqa: E402

SECRET = FOLDER / "secret"


async def try_all(sandbox: Any) -> dict[str, Any]:
    told: dict[str, Any] = {}
    await sandbox.start(force_build=False)
    root = sandbox.root
    told["reads"] = (await sandbox.exec(f"cat {SECRET}")).return_code
    told["writes"] = (await sandbox.exec("touch /usr/bin/new || touch /etc/passwd")).return_code
    told["keeps"] = (await sandbox.exec("echo kept > file; cd / && cat /app/file")).stdout
    told["variables"] = (await sandbox.exec("echo $A-$HOME", env={"A": "a"})).stdout
    told["processes"] = (await sandbox.exec("ls /proc | grep -c '^[0-9]'")).stdout
    told["networks"] = (await sandbox.exec("ls /sys/class/net 2>/dev/null; tail -n +3 /proc/net/dev")).stdout
    await sandbox.exec(f"ln -s {SECRET} /logs/agent/link; mkfifo /logs/agent/pipe; echo log > /logs/agent/log")
    await sandbox.download_dir("/logs/agent", FOLDER / "logs")
    told["downloaded"] = sorted(path.name for path in (FOLDER / "logs").iterdir())
    for call in (sandbox.download_file("/logs/agent/link", FOLDER / "x"), sandbox.upload_file(SECRET, "../../x")):
        try:
            await call
            told.setdefault("leads_outside", []).append(False)
        except LeadsOutside:
            told.setdefault("leads_outside", []).append(True)
    began = time.monotonic()
    try:
        await sandbox.exec("sleep 1000 & sleep 1000", timeout_sec=1)
    except TimeoutError:
        told["is_stopped"] = time.monotonic() - began < 60
    await sandbox.stop(delete=True)
    told["is_left"] = root.exists()
    return told


def make_sandbox(mode: str | None, **more: Any) -> Any:
    """For a task with this network mode; None if it says nothing of a network."""
    config = EnvironmentConfig() if mode is None else EnvironmentConfig(network_mode=NetworkMode(mode))
    return LocalSandbox(
        environment_dir=FOLDER,
        environment_name="try",
        session_id="try",
        trial_paths=TrialPaths(FOLDER / "trial"),
        task_env_config=config,
        network_policy=NetworkPolicy(network_mode=config.network_mode),
        **more,
    )


async def connects(sandbox: Any) -> bool:
    await sandbox.start(force_build=False)
    try:
        return bool((await sandbox.exec(f"exec 3<>/dev/tcp/127.0.0.1/{PORT}")).return_code == 0)
    finally:
        await sandbox.stop(delete=True)


async def why_refused(sandbox: Any) -> str:
    try:
        await sandbox.start(force_build=False)
    except RuntimeError as refused:
        return str(refused)
    return ""


async def told_by_all() -> dict[str, Any]:
    told = await try_all(make_sandbox("no-network"))
    told["connects"] = {
        "silent": await connects(make_sandbox(None)),
        "silent, with network": await connects(make_sandbox(None, network=True)),
        "none, with network": await connects(make_sandbox("no-network", network=True)),
    }
    told["refuses"] = await why_refused(make_sandbox("public"))
    return told


def main() -> None:
    sys.stdout.write(json.dumps(asyncio.run(told_by_all())))


if __name__ == "__main__":
    main()
