"""Tries to get out of LocalSandbox: `python try_sandbox.py CHILD FOLDER` prints what happened as JSON.

The folder has a file `secret`, which nothing inside may reach.
"""

import asyncio
import json
import sys
import time
from pathlib import Path
from typing import Any

CHILD, FOLDER = sys.argv[1], Path(sys.argv[2])
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


def main() -> None:
    sandbox = LocalSandbox(
        environment_dir=FOLDER,
        environment_name="try",
        session_id="try",
        trial_paths=TrialPaths(FOLDER / "trial"),
        task_env_config=EnvironmentConfig(),
        network_policy=NetworkPolicy(network_mode=NetworkMode.NO_NETWORK),
    )
    sys.stdout.write(json.dumps(asyncio.run(try_all(sandbox))))


if __name__ == "__main__":
    main()
