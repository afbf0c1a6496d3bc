"""The command line. Its --help loads nothing; a command loads what it needs."""

import os
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any

from stepwell import logs
from stepwell.errors import RayUnreachable, StepwellError

COMMANDS = {
    "up": ("start everything on this machine, and keep it running", "up.UpSettings", "up.run.run_up"),
    "down": ("end what `stepwell up` started in this folder", "up.DownSettings", "up.down.run_down"),
    "status": ("show on one screen what happens", "up.StatusSettings", "up.status.run_status"),
    "doctor": ("prove that an engine is token-exact, or say why not", "doctor.DoctorSettings", "doctor.run.run_doctor"),
    "pool": ("create the DataPool on a running Ray cluster", "pool.PoolSettings", "run_pool"),
    "gateway": ("serve agents and record what they do", "serving.GatewaySettings", "run_gateway"),
    "atropos": ("serve environments and trainers written for Atropos", "serving.AtroposSettings", "run_atropos"),
    "dashboard": ("serve a page that shows what happens", "dashboard.DashboardSettings", "run_dashboard"),
    "rewards": ("start reward workers on a running Ray cluster", "rewards.RewardSettings", "run_rewards"),
    "reward try": ("call a reward function on stored trajectories", "rewards.TrySettings", "run_try"),
    "rescore": ("copy stored trajectories with new rewards", "rewards.RescoreSettings", "run_rescore"),
    "export": ("write steps to Parquet, JSONL or a dataset", "exports.ExportSettings", "run_export"),
    "import": ("send exported steps into a running pool", "exports.ImportSettings", "run_import"),
    "demo": ("watch a tiny model learn, on a bare CPU", "demo.DemoSettings", "demo.run.run_demo"),
}
"""By name, of one or two words: what --help says, the settings in config/, the function, in wiring.py if no module is
named."""


def main(argv: Sequence[str] | None = None) -> None:
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] in ("-h", "--help"):
        print(usage())
    elif (command := command_of(arguments)) is not None:
        run(command, arguments[len(command.split()) :], f"stepwell {command}")
    else:
        fail("stepwell", f"unknown command {arguments[0]!r}; there are: {', '.join(COMMANDS)}", status=2)


def command_of(arguments: Sequence[str]) -> str | None:
    """The command that the first word names, or the first two."""
    candidates = (" ".join(arguments[:words]) for words in (1, 2))
    return next((command for command in candidates if command in COMMANDS), None)


def usage() -> str:
    lines = [f"  {name:10} {text}" for name, (text, *_) in COMMANDS.items()]
    return "\n".join(
        (
            "usage: stepwell COMMAND [FLAGS]\n",
            "Middleware for reinforcement learning of LLM agents.\n",
            *lines,
            "\nstepwell COMMAND --help lists its flags.",
        )
    )


def run(command: str, arguments: Sequence[str], program: str) -> None:
    """Run one command; whatever fails, fails in one line."""
    logs.setup(json=os.environ.get("STEPWELL_LOG") == "json")
    _, settings_name, function_name = COMMANDS[command]
    try:
        sections = import_module("stepwell.config.sections")
        settings = sections.read_settings(_named("config", settings_name), arguments, program)
    except StepwellError as failure:
        fail(program, str(failure), status=2)
    try:
        _named("", function_name)(settings)
    except RayUnreachable as failure:
        sys.stdout.flush()
        tell(program, str(failure))
        os._exit(1)  # Ray may still be trying, and would write on for as long as this process takes to end
    except StepwellError as failure:
        fail(program, str(failure), status=1)


def _named(room: str, path: str) -> Any:
    module, _, name = path.rpartition(".")
    return getattr(import_module(".".join(filter(None, ("stepwell", room, module or "wiring")))), name)


def fail(program: str, text: str, *, status: int) -> None:
    tell(program, text)
    sys.exit(status)


def tell(program: str, text: str) -> None:
    for line in text.splitlines():
        print(f"{program}: {line}", file=sys.stderr, flush=True)
