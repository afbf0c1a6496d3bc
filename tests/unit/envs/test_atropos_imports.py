"""What files that import atroposlib get: ours, the installed package's, or a sentence."""

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import stepwell.envs
from stepwell.envs import atropos_imports
from stepwell.envs.atropos_imports import OURS, PACKAGES, AtroposModules, NotOfAtropos


@pytest.fixture(autouse=True)
def finder(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As in `python -m stepwell.envs`, and undone afterwards."""
    monkeypatch.setattr(sys, "meta_path", [AtroposModules(), *sys.meta_path])
    before = set(sys.modules)
    yield
    for name in [name for name in sys.modules if name.startswith(PACKAGES[::4]) and name not in before]:
        del sys.modules[name]


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package of the name atroposlib."""
    files = {
        "__init__.py": "",
        "type_definitions.py": "GameStep = dict\nclass Move: ...\nnumber = 'theirs'",
        "envs/__init__.py": "",
        "envs/base.py": "raise AssertionError('their BaseEnv')",
        "envs/helper.py": "from atroposlib.envs.base import BaseEnv",
        "envs/reward_fns/__init__.py": "from .registry import registry",
        "envs/reward_fns/registry.py": "registry = 'theirs'",
    }
    for name, text in files.items():
        path = tmp_path / "atroposlib" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))


@pytest.mark.parametrize("module", OURS)
def test_every_module_of_the_table_is_there_without_atroposlib(module: str) -> None:
    assert importlib.import_module(module)


def test_base_env_is_ours() -> None:
    from atroposlib.envs.base import APIServer, APIServerConfig, BaseEnv, EvalHandlingEnum  # type: ignore[import-not-found]  # noqa: F401
    from atroposlib.envs.server_handling.managed_server import ManagedServerAdapter  # type: ignore[import-not-found]  # noqa: F401
    from atroposlib.type_definitions import GameHistory, Item, Message, number  # type: ignore[import-not-found]  # noqa: F401

    assert BaseEnv is stepwell.envs.BaseEnv
    assert isinstance(2.5, number)


def test_base_env_is_where_its_document_says() -> None:
    from trajectoryhandler.envs.base import BaseEnv, BaseEnvConfig  # type: ignore[import-not-found]  # noqa: F401

    assert BaseEnv is stepwell.envs.BaseEnv
    with pytest.raises(ModuleNotFoundError, match=r"trajectoryhandler\.api"):
        importlib.import_module("trajectoryhandler.api")


def test_a_users_own_package_of_that_name_is_the_users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "trajectoryhandler.py").write_text("mine = True")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert importlib.import_module("trajectoryhandler").mine


def test_a_module_that_is_not_ours_says_what_to_install() -> None:
    with pytest.raises(NotOfAtropos, match=r"atroposlib\.envs\.reward_fns is .* pip install --no-deps atroposlib"):
        importlib.import_module("atroposlib.envs.reward_fns")


def test_a_name_of_a_library_module_says_what_to_install() -> None:
    with pytest.raises(NotOfAtropos, match=r"GameStep of atroposlib\.type_definitions .* pip install --no-deps"):
        from atroposlib.type_definitions import GameStep  # noqa: F401


def test_a_name_that_base_env_lacks_is_a_sentence() -> None:
    with pytest.raises(NotOfAtropos, match=r"atroposlib\.envs\.base has no BaseLanguageEnv here"):
        from atroposlib.envs.base import BaseLanguageEnv  # noqa: F401


def test_a_file_that_tries_an_import_goes_on_without_it() -> None:
    try:
        from atroposlib.envs.reward_fns import registry  # type: ignore[import-not-found]
    except ModuleNotFoundError:
        registry = None
    assert registry is None


@pytest.mark.usefixtures("installed")
def test_library_modules_are_those_of_the_installed_package() -> None:
    from atroposlib.envs.reward_fns import registry
    from atroposlib.type_definitions import GameStep, number

    assert registry == "theirs"
    assert GameStep is dict
    assert number != "theirs"


@pytest.mark.usefixtures("installed")
def test_a_class_of_a_library_module_is_the_same_in_every_file() -> None:
    from atroposlib.type_definitions import Move

    def of_another_file() -> object:
        from atroposlib.type_definitions import Move as Same

        return Same()

    assert isinstance(of_another_file(), Move)


@pytest.mark.usefixtures("installed")
def test_modules_of_the_installed_package_get_our_base_env() -> None:
    from atroposlib.envs import helper  # type: ignore[import-not-found]

    assert helper.BaseEnv is stepwell.envs.BaseEnv


@pytest.mark.usefixtures("installed")
def test_a_module_that_the_installed_package_lacks_is_an_ordinary_error() -> None:
    with pytest.raises(ModuleNotFoundError, match=r"^No module named 'atroposlib\.envs\.nothing'$"):
        importlib.import_module("atroposlib.envs.nothing")


def test_every_module_of_the_table_has_its_parents_in_the_list() -> None:
    assert {name.rpartition(".")[0] for name in OURS} <= set(atropos_imports.PACKAGES)
