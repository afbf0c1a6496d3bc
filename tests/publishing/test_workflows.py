"""What the forge runs and shows: workflows, forms for issues. Their schemas and a linter for their safety judge them,
and what they run exists."""

import re
import subprocess
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import pytest
import yaml

from tests.publishing.tools import complaints

CHECKOUT = Path(__file__).parents[2]
FORGE = CHECKOUT / ".github"
WORKFLOWS = sorted((FORGE / "workflows").glob("*.yml"))
FORMS = sorted({*(FORGE / "ISSUE_TEMPLATE").glob("*.yml")} - {FORGE / "ISSUE_TEMPLATE" / "config.yml"})
SCHEMAS = {
    "vendor.github-workflows": WORKFLOWS,
    "custom.github-workflows-require-timeout": WORKFLOWS,
    "vendor.github-issue-forms": FORMS,
    "vendor.github-issue-config": [FORGE / "ISSUE_TEMPLATE" / "config.yml"],
    "vendor.dependabot": [FORGE / "dependabot.yml"],
}
ALLOWED = {
    ("publish", "id-token"),
    ("publish", "attestations"),
    ("image", "packages"),
    ("image", "id-token"),
    ("image", "attestations"),
    ("announce", "contents"),
}
"""What a job may write, besides its own log."""


def jobs(workflow: Path) -> dict[str, Mapping[str, Any]]:
    return cast("dict[str, Mapping[str, Any]]", yaml.safe_load(workflow.read_text())["jobs"])


def steps() -> Iterator[Mapping[str, Any]]:
    for workflow in WORKFLOWS:
        for job in jobs(workflow).values():
            yield from job["steps"]


def scripts() -> list[str]:
    return [step["run"] for step in steps() if "run" in step]


@pytest.mark.parametrize("schema", SCHEMAS)
def test_files_fit_their_schemas(schema: str) -> None:
    assert SCHEMAS[schema]
    assert complaints("check-jsonschema", f"--builtin-schema={schema}", *SCHEMAS[schema]) == ""


def test_a_linter_finds_no_way_in() -> None:
    assert complaints("zizmor", "--offline", "--no-progress", "--color=never", FORGE) == ""


def test_actions_are_pinned_to_commits_one_for_each() -> None:
    text = "\n".join(path.read_text() for path in WORKFLOWS)
    used = {f"{action}{version}" for action, version in re.findall(r"uses: (\S+)(.*)", text)}
    assert [line for line in used if not re.fullmatch(r"[\w./-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+", line)] == []
    assert len({line.partition("@")[0] for line in used}) == len(used), "one action, two versions"


def test_only_the_release_may_write_and_only_what_it_publishes() -> None:
    assert all(yaml.safe_load(path.read_text())["permissions"] == {"contents": "read"} for path in WORKFLOWS)
    for path in WORKFLOWS:
        for name, job in jobs(path).items():
            for what, right in job.get("permissions", {}).items():
                assert right == "read" or (path.stem == "release" and (name, what) in ALLOWED), (path.name, name, what)


def test_what_workflows_run_exists() -> None:
    recipes = set(re.findall(r"^([a-z][\w-]*)[^\n=]*:(?!=)", (CHECKOUT / "justfile").read_text(), re.M))
    named = {recipe for script in scripts() for recipe in re.findall(r"^just (\S+)", script, re.M)}
    assert named
    assert named <= recipes
    paths = {path for script in scripts() for path in re.findall(r"\b(?:scripts|locks|deploy)/[\w./-]+", script)}
    assert paths
    assert [path for path in paths if not (CHECKOUT / path).exists()] == []
    for script in scripts():
        plain = re.sub(r"\$\{\{.*?\}\}", "given", script)
        done = subprocess.run(["bash", "-n", "-c", plain], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr


def test_every_python_that_is_named_is_tested() -> None:
    project = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())["project"]
    named = [line.rpartition(" ")[2] for line in project["classifiers"] if "Python :: 3." in line]
    matrices = [
        job["strategy"]["matrix"]["python"] for path in WORKFLOWS for job in jobs(path).values() if "strategy" in job
    ]
    assert matrices == [named, named]
    nightly = jobs(FORGE / "workflows" / "nightly.yml")["nightly"]["steps"]
    (several,) = [step["with"]["python-version"] for step in nightly if "setup-python" in step.get("uses", "")]
    assert sorted(several.split()) == named


def test_programs_that_tests_start_are_installed_before() -> None:
    """.ci/run installs them for its tests; here the workflows do."""
    wanted = set(re.findall(r"--no-install-recommends (\w+)", (CHECKOUT / ".ci" / "run").read_text()))
    (installed,) = [
        set(re.findall(r"--no-install-recommends (.*)", step["run"])[0].split())
        for step in jobs(FORGE / "workflows" / "nightly.yml")["nightly"]["steps"]
        if "apt-get" in step.get("run", "")
    ]
    assert wanted <= installed
