"""The commands: for each, or for a family of them, a module with its settings and its function.

A module is imported when its command is given, and imports what is heavy inside its functions: help stays quick, and a
process holds only what it uses. A gateway, for example, does not import Ray, which takes much memory.
"""

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any, get_type_hints

if TYPE_CHECKING:
    from stepwell.commands.sections import Section

COMMANDS: Mapping[str, tuple[str, str]] = {
    "up": ("start everything on this machine, and keep it running", "up.run_up"),
    "down": ("stop what `stepwell up` started in this folder", "up.run_down"),
    "status": ("show the state of everything on one screen", "status.run_status"),
    "doctor": ("check whether an engine is token-exact", "doctor.run_doctor"),
    "pool": ("create the DataPool on a running Ray cluster", "pool.run_pool"),
    "gateway": ("serve agents and record their calls", "gateway.run_gateway"),
    "gateway key": ("make a key by which a user opens sessions", "keys.run_gateway_key"),
    "keys create": ("make a key with a role", "keys.run_create"),
    "keys list": ("show the keys with roles", "keys.run_list"),
    "keys revoke": ("make a key void", "keys.run_revoke"),
    "audit verify": ("check a record of control calls", "keys.run_verify"),
    "atropos": ("serve environments and trainers written for Atropos", "atropos.run_atropos"),
    "envs run": ("make rollouts of verifiers or Harbor tasks", "envs_run.run_envs"),
    "dashboard": ("serve the web dashboard", "dashboard.run_dashboard"),
    "link": ("let gateways and dashboards on machines without Ray use the DataPool", "link.run_link"),
    "rewards": ("start reward workers on a running Ray cluster", "rewards.run_rewards"),
    "reward try": ("call a reward function on stored trajectories", "rewards.run_try"),
    "rescore": ("copy stored trajectories with new rewards", "rewards.run_rescore"),
    "policy list": ("show the policy's versions, the canary and decisions", "policy.run_list"),
    "policy set": ("set the policy's version to one that engines have", "policy.run_set"),
    "policy promote": ("give the canary to all sessions", "policy.run_promote"),
    "policy rollback": ("end the canary at once", "policy.run_rollback"),
    "train": ("train the served model on what agents do", "train.run_train"),
    "export": ("write steps to Parquet, JSONL or a dataset", "export.run_export"),
    "import": ("send exported steps into a running pool", "export.run_import"),
    "forget": ("delete everything of one person, with a receipt", "forget.run_forget"),
    "lineage": ("show what a version of the policy was trained on", "lineage.run_lineage"),
    "demo": ("train a tiny model on a CPU", "demo.run_demo"),
}
"""Each command, of one or two words: its line in --help, and its function, whose parameter has its settings."""


def function_of(command: str) -> Callable[[Any], None]:
    module, _, name = COMMANDS[command][1].partition(".")
    function: Callable[[Any], None] = getattr(import_module(f"stepwell.commands.{module}"), name)
    return function


def settings_of(command: str) -> "type[Section]":
    settings: type[Section] = get_type_hints(function_of(command))["settings"]
    return settings
