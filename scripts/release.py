"""Build what is published, and say what is new in it.

- sdist and wheel contain tracked files only, and the wheel is built from the sdist. Two builds of one commit are
  the same bytes.
- On an index of packages the README's relative links lead nowhere. So in what is published they are addresses of the
  release in the repository that pyproject.toml names (`Repository` in [project.urls]).
- The tag of a release is v and the version in pyproject.toml, and CHANGELOG.md has a section with that title.

    python scripts/release.py build dist
    python scripts/release.py notes v0.2.0
"""

import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path
from typing import Any

from cached_env import run, say
from release_tools import release_tools

CHECKOUT = Path(__file__).parents[1]
LINK = re.compile(r"(?P<before>(?P<image>!?)\[(?:[^\[\]]|\[[^\]]*\])*\]\()(?P<target>[^()\s:#][^()\s:]*)\)")
"""A link of Markdown to a file of the repository."""


def main() -> None:
    what, argument = sys.argv[1:]
    if what == "build":
        build(Path(argument))
    elif what == "notes":
        sys.stdout.write(notes(argument, project(), (CHECKOUT / "CHANGELOG.md").read_text()))
    else:
        raise SystemExit(__doc__)


def build(target: Path) -> None:
    """sdist and wheel, into that folder; both pass `twine check`."""
    tools = release_tools()
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        copy_tracked(copy)
        made = project()
        repository = made.get("urls", {}).get("Repository")
        if repository is None:
            say("pyproject.toml names no Repository in [project.urls]: on an index, the README's links lead nowhere")
        else:
            readme = copy / "README.md"
            readme.write_text(with_addresses(readme.read_text(), repository, f"v{made['version']}"))
        run(tools / "python", "-m", "build", "--no-isolation", "--outdir", target.resolve(), copy)
    run(tools / "twine", "check", "--strict", *sorted(target.glob("stepwell-*")))


def notes(tag: str, project: dict[str, Any], changelog: str) -> str:
    """The changelog's section of a release that is ready; SystemExit says what is missing."""
    if tag != f"v{project['version']}":
        raise SystemExit(f"the tag {tag} is not v{project['version']}, the version in pyproject.toml")
    if "Repository" not in project.get("urls", {}):
        raise SystemExit("pyproject.toml names no Repository in [project.urls]")
    sections = dict(re.findall(r"^## (\S+)[^\n]*\n(.*?)(?=^## |\Z)", changelog, re.M | re.S))
    section: str = sections.get(project["version"], "").strip()
    if not section:
        raise SystemExit(f"CHANGELOG.md has no section '## {project['version']}'")
    return section + "\n"


def with_addresses(text: str, repository: str, tag: str) -> str:
    def address(match: re.Match[str]) -> str:
        return f"{match['before']}{repository}/{'raw' if match['image'] else 'blob'}/{tag}/{match['target']})"

    return LINK.sub(address, text)


def project() -> dict[str, Any]:
    made: dict[str, Any] = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())["project"]
    return made


def copy_tracked(target: Path) -> None:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=CHECKOUT, check=True, capture_output=True, text=True)
    for name in filter(None, listed.stdout.split("\0")):
        source = CHECKOUT / name
        if source.is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target / name)


if __name__ == "__main__":
    main()
