"""scripts/shape.py counts what it says, on a package that is made here."""

import ast
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
import shape

CLIENT = '''"""The client. It can forget."""

from stepwell.pool.rules import decide


class PoolClient:
    """Of all shards."""

    def curate(self) -> None:
        # why
        decide()  # and how

    def _private(self) -> None: ...


class Curator(Protocol):
    def curate(self) -> None: ...


class Other(Protocol):
    def ping(self) -> None: ...


class Fields(Protocol):
    name: str
'''
RULES = "def decide() -> None:\n" + "    pass\n" * 60


def module(path: str, text: str) -> shape.Module:
    return shape.Module(path, text, ast.parse(text))


def measured(name: str) -> shape.Figure:
    modules = [module("pool/client.py", CLIENT), module("pool/rules.py", RULES), module("pool/__init__.py", "")]
    (figure,) = (figure for figure in shape.shape_of(modules) if figure.name == name)
    return figure


def test_docstrings_comments_and_blank_lines_are_no_code() -> None:
    assert measured("lines").value == CLIENT.count("\n") + 61
    assert measured("code lines").value == 11 + 61
    assert measured("comments").value == 2


def test_long_functions_and_small_modules_are_named() -> None:
    assert measured("long functions").found == ["pool/rules.py decide: 61 lines"]
    assert measured("small modules").found == [f"pool/client.py: {CLIENT.count(chr(10))} lines"]


def test_a_feature_is_searched_in_identifiers_and_in_the_text() -> None:
    assert measured("files that name forgetting").found == []
    assert measured("files that tell of forgetting").found == ["pool/client.py"]
    assert measured("files that name curation").found == ["pool/client.py"]


def test_a_protocol_describes_the_pool_if_the_pool_has_its_methods() -> None:
    assert measured("pool protocols").found == ["Curator"]


def test_public_names_and_headless_docstrings_are_counted() -> None:
    assert measured("public names").value == 5
    assert measured("headless docstrings").found == ["pool/client.py:7"]
