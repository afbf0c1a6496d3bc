"""The modules that a file gets which imports atroposlib: ours for everything that reaches a server or the rollout
server.

- OURS is the whole table. It holds for atroposlib's own modules too: its helpers get our BaseEnv.
- Every other module of atroposlib (reward functions, parsers) is the installed one. Stepwell does not depend on it, so
  where it is missing the error says what to install.
"""

import sys
from collections.abc import Mapping, Sequence
from functools import partial
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import module_from_spec
from types import ModuleType

from stepwell.errors import StepwellError

ATROPOSLIB = "atroposlib"
DOCUMENTED = "trajectoryhandler"
"""Atropos' document of BaseEnv has it in this package, which Atropos has renamed since."""
INSTALL = "pip install --no-deps atroposlib==0.4.0"
NAMES = "stepwell.envs.atropos_imports"
OURS: Mapping[str, str] = {
    "atroposlib.envs.base": NAMES,
    "atroposlib.envs.eval": "stepwell.envs.evaluation",
    "atroposlib.envs.server_handling.managed_server": NAMES,
    "atroposlib.envs.server_handling.openai_server": NAMES,
    "atroposlib.envs.server_handling.server_baseline": NAMES,
    "atroposlib.envs.server_handling.server_manager": NAMES,
    "atroposlib.envs.server_handling.sglang_server": NAMES,
    "atroposlib.envs.server_handling.trl_vllm_server": NAMES,
    "atroposlib.envs.server_handling.vllm_server": NAMES,
    "atroposlib.envs.teacher_distillation_env": "stepwell.envs.distillation",
    "atroposlib.type_definitions": NAMES,
    "atroposlib.utils.tokenize_for_trainer": NAMES,
    "trajectoryhandler.envs.base": NAMES,
}
"""Modules of atroposlib, and what stands in their place."""
LIBRARY = ("atroposlib.type_definitions", "atroposlib.utils.tokenize_for_trainer")
"""Modules of OURS whose other names are those of the installed atroposlib."""
PACKAGES = (
    *("atroposlib", "atroposlib.envs", "atroposlib.envs.server_handling", "atroposlib.utils"),
    *("trajectoryhandler", "trajectoryhandler.envs"),
)
"""Parents of OURS. They are empty where atroposlib is not installed."""


class NotOfAtropos(ModuleNotFoundError, StepwellError):
    """A module or a name of atroposlib that is neither ours nor installed."""


class AtroposModules(MetaPathFinder, Loader):
    def __init__(self) -> None:
        self._theirs: dict[str, ModuleType] = {}
        """The installed package's modules behind LIBRARY. Each is loaded once, so that its classes are the same."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        root = fullname.partition(".")[0]
        if root not in (ATROPOSLIB, DOCUMENTED) or (root == DOCUMENTED and PathFinder.find_spec(root) is not None):
            return None
        if fullname in OURS:
            return ModuleSpec(fullname, self)
        installed = PathFinder.find_spec(fullname, path)
        if installed is None and fullname in PACKAGES:
            return ModuleSpec(fullname, self, is_package=True)
        if installed is None and root == ATROPOSLIB and not is_installed():
            raise NotOfAtropos(f"{fullname} is a module of atroposlib, which is not installed: {INSTALL}")
        return installed

    def exec_module(self, module: ModuleType) -> None:
        name = module.__name__
        if name in OURS:
            ours = import_module(OURS[name])
            vars(module).update({each: value for each, value in vars(ours).items() if not each.startswith("_")})
            vars(module)["__getattr__"] = partial(self._other_name, name)

    def _other_name(self, module: str, name: str) -> object:
        """A name that our module lacks."""
        if name.startswith("__"):
            raise AttributeError(name)
        if module not in LIBRARY:
            raise NotOfAtropos(f"{module} has no {name} here: {OURS[module]} stands in its place, and has no such name")
        if not is_installed():
            raise NotOfAtropos(f"{name} of {module} is atroposlib's, which is not installed: {INSTALL}")
        if module not in self._theirs:
            theirs = PathFinder.find_spec(module, sys.modules[module.rpartition(".")[0]].__path__)
            if theirs is None or theirs.loader is None:
                raise AttributeError(name)
            loaded = module_from_spec(theirs)
            theirs.loader.exec_module(loaded)
            self._theirs[module] = loaded
        return getattr(self._theirs[module], name)


def is_installed() -> bool:
    return PathFinder.find_spec(ATROPOSLIB) is not None


def install_finder() -> None:
    """Makes imports of atroposlib in this process those of the table, from now on."""
    sys.meta_path.insert(0, AtroposModules())
