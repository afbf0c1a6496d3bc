"""NeMo Gym as published, as far as it can be imported without its requirements: its capture of tokens."""

import ast
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

from rig.foreign import foreign_env

CONSTANTS = ("config_types", "global_config")
"""Modules that need what is not installed. Here they have their constants only."""


@contextmanager
def importable_gym() -> Iterator[None]:
    package = foreign_env("nemo_gym") / "nemo_gym"
    top = ModuleType("nemo_gym")
    top.__path__ = [str(package)]
    sys.modules["nemo_gym"] = top
    for name in CONSTANTS:
        sys.modules[f"nemo_gym.{name}"] = constants_of(package / f"{name}.py")
    try:
        yield
    finally:
        for name in [name for name in sys.modules if name.partition(".")[0] == "nemo_gym"]:
            del sys.modules[name]


def constants_of(file: Path) -> ModuleType:
    module = ModuleType(f"nemo_gym.{file.stem}")
    for node in ast.parse(file.read_text()).body:
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Constant(value=value)):
                setattr(module, name, value)
    return module
