"""The command line, and the cost of imports."""

import os
import re
import shlex
import subprocess
import sys
from functools import cache
from importlib.metadata import version

import pytest

from stepwell import cli
from stepwell.commands import COMMANDS, settings_of
from stepwell.commands.sections import read_settings

HEAVY = ("ray", "fastapi", "pydantic", "torch", "transformers", "aiohttp", "uvicorn")
OFFLINE = (
    *("down", "status", "doctor", "gateway key", "reward try", "rescore", "lineage", "demo"),
    *("keys create", "keys list", "keys revoke", "audit verify", "envs run"),
)
"""Commands without --ray-namespace."""


def run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *command], capture_output=True, text=True, timeout=180, check=False)


@cache
def help_of(command: str) -> str:
    done = run("-m", "stepwell", *command.split(), "--help")
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("module", ["stepwell.pool.rules.pool", "stepwell"])
def test_the_rules_and_the_client_import_nothing_heavy(module: str) -> None:
    loaded = run("-c", f"import {module}, sys; print([name for name in {HEAVY} if name in sys.modules])")
    assert loaded.stdout == "[]\n", loaded.stderr


@pytest.mark.parametrize("module", ["stepwell.commands.up", "stepwell.demo.run", "stepwell.demo.live_run"])
def test_a_command_that_starts_ray_does_not_import_it_before_its_settings_are_made(module: str) -> None:
    loaded = run("-c", f"import {module}, sys; print('ray' in sys.modules)")
    assert loaded.stdout == "False\n", loaded.stderr


def test_help_takes_under_half_a_second_of_cpu() -> None:
    def seconds() -> float:
        before = os.times()
        assert run("-m", "stepwell", "--help").returncode == 0
        after = os.times()
        return after.children_user + after.children_system - before.children_user - before.children_system

    assert min(seconds() for _ in range(3)) < 0.5


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    cli.main(["--help"])
    shown = capsys.readouterr().out
    assert all(f"  {command} " in shown for command in COMMANDS)


def test_it_says_which_version_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    cli.main(["--version"])
    assert capsys.readouterr().out == f"stepwell {version('stepwell')}\n"


def test_an_unknown_command_is_refused_with_the_ones_there_are() -> None:
    done = run("-m", "stepwell", "puol")
    assert done.returncode == 2
    known = "up, down, status, doctor, pool, gateway, gateway key, keys create, keys list, keys revoke, audit verify"
    servers = "atropos, envs run, dashboard, link, rewards, reward try, rescore"
    more = "policy list, policy set, policy promote, policy rollback, train, export, import, forget, lineage, demo"
    assert done.stderr == f"stepwell: unknown command 'puol'; there are: {known}, {servers}, {more}\n"


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_its_flags(command: str) -> None:
    shown = help_of(command)
    assert shown.startswith(f"usage: stepwell {command} ")
    assert ("--ray-namespace" in shown) == (command not in OFFLINE)


def test_an_incomplete_command_of_two_words_is_refused() -> None:
    done = run("-m", "stepwell", "reward", "tyr")
    assert done.returncode == 2
    assert done.stderr == "stepwell: unknown command 'reward tyr'; there are: reward try\n"


@pytest.mark.parametrize("more", [[], ["--help"], ["-h"]])
def test_the_first_word_of_a_family_alone_lists_its_commands(
    more: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    cli.main(["keys", *more])
    shown = capsys.readouterr().out
    assert re.findall(r"^  (keys \w+) ", shown, re.M) == ["keys create", "keys list", "keys revoke"]
    assert "doctor" not in shown


def test_an_unknown_flag_is_a_sentence_with_the_one_that_was_meant() -> None:
    done = run("-m", "stepwell", "pool", "--shrads", "2")
    said = "stepwell pool: unrecognized arguments: --shrads 2; did you mean --shards?\n"
    assert (done.returncode, done.stderr) == (2, said)


def test_a_missing_flag_is_a_sentence() -> None:
    done = run("-m", "stepwell", "export")
    assert (done.returncode, done.stderr) == (2, "stepwell export: --to is missing\n")


LINK = ("--link-secret-file", "--link-ca-file")
LISTENING = ("--insecure", "--no-insecure", "--allowed-hosts", "--tls-cert", "--tls-key")


def test_the_gateway_takes_exactly_the_flags_it_documents() -> None:
    shown = run("-m", "stepwell.gateway", "--help").stdout
    flags = set(re.findall(r"--[a-z-]+", shown))
    assert flags == {
        *("--data-pool-name", "--vllm-addresses", "--tokenizer-path", "--prompt-length", "--response-length"),
        *("--reward-worker-name", "--ray-address", "--ray-namespace", "--host", "--port", "--help"),
        *("--control-keys", "--engine-key", "--routing", "--durability", "--unchecked-calls"),
        *("--bridge", "--thinking"),
        *("--spool", "--spool-bytes", "--workers"),
        *("--atropos", "--no-atropos", "--atropos-state"),
        *("--sampling", "--temperature", "--model", "--other-models", "--session-sample"),
        *("--marked-side-calls", "--tool-calls"),
        *("--forward-fields", "--media-hosts", "--quota", "--redact", "--keys-file", "--audit-log"),
        *LINK,
        *LISTENING,
    }


def test_the_atropos_server_takes_exactly_the_flags_it_documents() -> None:
    flags = set(re.findall(r"--[a-z-]+", help_of("atropos")))
    assert flags == {
        *("--data-pool-name", "--control-keys", "--state", "--ray-address", "--ray-namespace"),
        *("--host", "--port", "--help", "--keys-file", "--audit-log"),
        *LINK,
        *LISTENING,
    }


@pytest.mark.parametrize("command", COMMANDS)
def test_help_names_the_values_of_flags_in_words_and_fits_a_screen(command: str) -> None:
    assert [line for line in help_of(command).splitlines() if len(line) > 120] == []
    usage = help_of(command).partition("\n\n")[0]
    values = re.findall(r"--[\w-]+ ([^\s{\]]+)\]", usage)
    assert [value for value in values if not value.isupper()] == []


@pytest.mark.parametrize("command", COMMANDS)
def test_help_shows_no_default_that_is_none_or_written_as_in_python(command: str) -> None:
    defaults = re.findall(r"\(default(?: factory)?:\s+(.*?)\)[\n$]", help_of(command), re.S)
    assert [shown for shown in defaults if re.match(r"None|False|dict|[('\[{]", shown)] == []


@pytest.mark.parametrize("command", COMMANDS)
def test_help_ends_with_examples_that_the_command_takes(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir("/")  # where no stepwell.toml is
    shown = help_of(command).partition("\nexamples:\n")[2]
    lines = [line.removeprefix("  ") for line in shown.rstrip().splitlines()]
    found = re.split(r"\n(?=stepwell )", "\n".join(lines))
    settings = settings_of(command)
    assert tuple(found) == settings.examples
    for example in found:
        words = shlex.split(example.replace("\\\n", " "))
        assert words[0] == "stepwell"
        assert cli.command_of(words[1:]) == command
        read_settings(settings, words[1 + len(command.split()) :], command)


def test_every_command_has_an_example_of_its_own_and_the_first_ones_are_commands() -> None:
    assert all("examples" in vars(settings_of(command)) for command in COMMANDS)
    commands = [line.split("   ")[0] for line in cli.usage().partition("examples:\n")[2].splitlines()]
    assert len(commands) == 4
    assert all(cli.command_of(command.split()[1:]) for command in commands)


def test_values_are_named_for_what_they_are() -> None:
    wanted = {
        "gateway": ("--host ADDRESS", "--port PORT", "--spool FILE", "--spool-bytes BYTES", "--tokenizer-path FOLDER"),
        "pool": ("--group-deadline SECONDS", "--completion-grace SECONDS", "--max-share-per-user SHARE"),
        "envs run": ("--gateway ADDRESS", "--python PATH", "--config FILE", "--timeout SECONDS"),
        "forget": ("--older-than DURATION", "--receipt FILE"),
    }
    for command, flags in wanted.items():
        assert [flag for flag in flags if f"  {flag}" not in help_of(command)] == []
