"""The command line. `stepwell --help` imports no room; a command imports only what it needs."""

import os
import sys
from collections.abc import Iterable, Sequence
from importlib import import_module
from importlib.metadata import version
from typing import Any

from stepwell import logs
from stepwell.common.private_files import keep_files_private
from stepwell.errors import RayUnreachable, StepwellError

COMMANDS = {
    "up": ("start everything on this machine, and keep it running", "up.UpSettings", "up.command_up.run_up"),
    "down": ("stop what `stepwell up` started in this folder", "up.DownSettings", "up.command_down.run_down"),
    "status": ("show the state of everything on one screen", "up.StatusSettings", "up.command_status.run_status"),
    "doctor": ("check whether an engine is token-exact", "tools.DoctorSettings", "doctor.command.run_doctor"),
    "pool": ("create the DataPool on a running Ray cluster", "pool.PoolSettings", "wiring.pool.run_pool"),
    "gateway": ("serve agents and record their calls", "serving.GatewaySettings", "wiring.gateway.run_gateway"),
    "gateway key": (
        "make a key by which a user opens sessions",
        "serving.SessionKeySettings",
        "wiring.session_keys.run_gateway_key",
    ),
    "keys create": ("make a key with a role", "key_commands.CreateKeySettings", "up.command_keys.run_create"),
    "keys list": ("show the keys with roles", "key_commands.ListKeysSettings", "up.command_keys.run_list"),
    "keys revoke": ("make a key void", "key_commands.RevokeKeySettings", "up.command_keys.run_revoke"),
    "audit verify": (
        "check a record of control calls",
        "key_commands.AuditVerifySettings",
        "up.command_keys.run_verify",
    ),
    "atropos": (
        "serve environments and trainers written for Atropos",
        "serving.AtroposSettings",
        "wiring.atropos.run_atropos",
    ),
    "envs run": (
        "make rollouts of verifiers or Harbor tasks",
        "envs_run.EnvsRunSettings",
        "agents.foreign.envs_command.run_envs",
    ),
    "dashboard": ("serve the web dashboard", "serving.DashboardSettings", "wiring.dashboard.run_dashboard"),
    "link": (
        "let gateways and dashboards on machines without Ray use the DataPool",
        "serving.LinkSettings",
        "wiring.link_server.run_link",
    ),
    "rewards": (
        "start reward workers on a running Ray cluster",
        "rewards.RewardSettings",
        "wiring.rewards.run_rewards",
    ),
    "reward try": ("call a reward function on stored trajectories", "rewards.TrySettings", "wiring.rewards.run_try"),
    "rescore": ("copy stored trajectories with new rewards", "rewards.RescoreSettings", "wiring.rewards.run_rescore"),
    "policy list": (
        "show the policy's versions, the canary and decisions",
        "policy_commands.PolicyListSettings",
        "up.command_policy.run_list",
    ),
    "policy set": (
        "set the policy's version to one that engines have",
        "policy_commands.PolicySetSettings",
        "up.command_policy.run_set",
    ),
    "policy promote": (
        "give the canary to all sessions",
        "policy_commands.PromoteSettings",
        "up.command_policy.run_promote",
    ),
    "policy rollback": (
        "end the canary at once",
        "policy_commands.RollbackSettings",
        "up.command_policy.run_rollback",
    ),
    "export": ("write steps to Parquet, JSONL or a dataset", "exports.ExportSettings", "wiring.exports.run_export"),
    "import": ("send exported steps into a running pool", "exports.ImportSettings", "wiring.exports.run_import"),
    "forget": (
        "delete everything of one person, with a receipt",
        "forgetting.ForgetSettings",
        "up.command_forget.run_forget",
    ),
    "lineage": (
        "show what a version of the policy was trained on",
        "lineage.LineageSettings",
        "up.command_lineage.run_lineage",
    ),
    "demo": ("train a tiny model on a CPU", "tools.DemoSettings", "demo.run.run_demo"),
}
"""Each command, of one or two words: its line in --help, its settings class in config/, and its function."""

EXAMPLES = (
    "examples:",
    "  stepwell doctor --engine http://127.0.0.1:8001   before a run: is this engine token-exact?",
    "  stepwell up --engine http://127.0.0.1:8001       everything on this machine",
    "  stepwell status                                  what it does",
    "  stepwell down                                    stop it; the data stays",
)


def main(argv: Sequence[str] | None = None) -> None:
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] in ("-h", "--help"):
        print(usage())
    elif arguments[0] == "--version":
        print(f"stepwell {version('stepwell')}")
    elif (command := command_of(arguments)) is not None:
        run(command, arguments[len(command.split()) :], f"stepwell {command}")
    elif (family := commands_under(arguments[0])) and (len(arguments) == 1 or arguments[1] in ("-h", "--help")):
        print(family_usage(family))
    else:
        words = " ".join(arguments[: 2 if family else 1])
        fail("stepwell", f"unknown command {words!r}; there are: {', '.join(family or COMMANDS)}", status=2)


def command_of(arguments: Sequence[str]) -> str | None:
    """The command that the first two words or the first word name."""
    candidates = (" ".join(arguments[:words]) for words in (2, 1))
    return next((command for command in candidates if command in COMMANDS), None)


def commands_under(word: str) -> list[str]:
    """The commands of two words that begin with this one."""
    return [command for command in COMMANDS if command.startswith(f"{word} ")]


def family_usage(commands: Sequence[str]) -> str:
    return "\n".join(
        ("usage: stepwell COMMAND [FLAGS]\n", *_lines(commands), "\nstepwell COMMAND --help lists its flags.")
    )


def usage() -> str:
    return "\n".join(
        (
            "usage: stepwell COMMAND [FLAGS]\n",
            "Middleware for reinforcement learning of LLM agents.\n",
            *_lines(COMMANDS),
            "\nstepwell COMMAND --help lists its flags, with examples. stepwell --version prints the version.\n",
            *EXAMPLES,
        )
    )


def _lines(commands: Iterable[str]) -> list[str]:
    return [f"  {name:15} {COMMANDS[name][0]}" for name in commands]


def run(command: str, arguments: Sequence[str], program: str) -> None:
    """Run one command. A failure is reported in one line."""
    logs.setup(json=os.environ.get("STEPWELL_LOG") == "json")
    keep_files_private()
    _, settings_name, function_name = COMMANDS[command]
    try:
        sections = import_module("stepwell.config.sections")
        epilog = _named("stepwell.config", "examples.examples_text")(command)
        settings = sections.read_settings(_named("stepwell.config", settings_name), arguments, program, epilog=epilog)
    except StepwellError as failure:
        fail(program, str(failure), status=2)
    try:
        _named("stepwell", function_name)(settings)
    except RayUnreachable as failure:
        sys.stdout.flush()
        tell(program, str(failure))
        os._exit(1)  # Ray may still try to connect, and would print until this process has ended
    except StepwellError as failure:
        fail(program, str(failure), status=1)


def _named(package: str, path: str) -> Any:
    module, _, name = path.rpartition(".")
    return getattr(import_module(f"{package}.{module}"), name)


def fail(program: str, text: str, *, status: int) -> None:
    tell(program, text)
    sys.exit(status)


def tell(program: str, text: str) -> None:
    for line in text.splitlines():
        print(f"{program}: {line}", file=sys.stderr, flush=True)
