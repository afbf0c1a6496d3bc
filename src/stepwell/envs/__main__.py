"""`python -m stepwell.envs my_env.py serve …` runs an environment that imports atroposlib, unchanged, from any folder.

- In this process, atropos_imports answers imports of atroposlib.
- The folder of the file is on sys.path, as `python FILE` puts it there. A folder above the file can be imported by its
  name, as `python -m` in the folder above that one allows. A file with relative imports runs as a module of a package.
"""

import ast
import runpy
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType

from stepwell.common.command_line import fail
from stepwell.envs.atropos_imports import NotOfAtropos, install_finder


class FoldersAbove(MetaPathFinder):
    """Finds the folders that the file lies in, as packages."""

    def __init__(self, folders: Sequence[Path]) -> None:
        self._folders = {folder.name: str(folder.parent) for folder in reversed(folders)}

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return PathFinder.find_spec(fullname, [self._folders[fullname]]) if fullname in self._folders else None


def main() -> None:
    if len(sys.argv) < 2:
        fail("stepwell.envs", "name a file: python -m stepwell.envs FILE COMMAND [FLAGS]", status=2)
    file = Path(sys.argv[1]).absolute()
    if not file.exists():
        fail("stepwell.envs", f"there is no file {file}", status=2)
    install_finder()
    sys.meta_path.append(FoldersAbove(file.parents))
    del sys.argv[0]
    sys.path.insert(0, str(file.parent))
    try:
        run(file)
    except NotOfAtropos as missing:
        fail(file.name, str(missing), status=1)


def run(file: Path) -> None:
    package = package_of(file)
    if package:
        sys.meta_path.insert(0, FoldersAbove(package[-1:]))  # its folder on sys.path may have a file of the same name
        names = [folder.name for folder in reversed(package)]
        runpy.run_module(".".join((*names, file.stem)), run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(str(file), run_name="__main__")


def package_of(file: Path) -> Sequence[Path]:
    """The folders that the relative imports of the file need as packages, from inside out; empty if it has none."""
    imports = (node for node in ast.walk(ast.parse(file.read_bytes())) if isinstance(node, ast.ImportFrom))
    depth = max((node.level for node in imports), default=0)
    while depth and (file.parents[depth] / "__init__.py").exists():
        depth += 1
    return file.parents[:depth]


if __name__ == "__main__":
    main()
