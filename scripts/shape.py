"""Measure the shape of the source: its size, where features are named, and which modules one recorded call runs.

- Every figure stands beside what is searched or counted for it.
- A figure says nothing about quality by itself. It shows whether a change of the structure does what it is meant to do.

    python scripts/shape.py           # reads src/ only
    python scripts/shape.py --call    # also records a call of a fake engine and fetches it as tensors
    python scripts/shape.py --names   # also the files and classes behind each figure
"""

import argparse
import ast
import asyncio
import io
import json
import re
import sys
import tokenize
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

CHECKOUT = Path(__file__).parents[1]
SOURCE = CHECKOUT / "src" / "stepwell"
LONG_FUNCTION = 60
SHORT_MODULE = 60
FEATURES = {
    "forgetting": "forget|forgot",
    "canary": "canary|canaries",
    "curation": "curat",
    "sessions": "session",
    "left out": "left_out",
}
"""What is searched for each feature, whatever the case: once in the identifiers of a file, once in its whole text."""
POOL_CLASSES = ("PoolClient", "DataPool", "ShardService")
"""A Protocol with methods describes the pool if one of these classes, with its bases, has all of them."""
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
NO_CODE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}


@dataclass(frozen=True, slots=True)
class Module:
    path: str
    """Below src/stepwell."""
    text: str
    tree: ast.Module

    @property
    def name(self) -> str:
        return ".".join(("stepwell", *self.path.removesuffix(".py").removesuffix("/__init__").split("/")))

    @property
    def is_package(self) -> bool:
        return self.path.endswith("__init__.py")

    @property
    def lines(self) -> int:
        return self.text.count("\n")

    def nodes(self) -> Iterator[ast.AST]:
        return ast.walk(self.tree)


@dataclass(frozen=True, slots=True)
class Figure:
    name: str
    value: int
    how: str
    """What is counted."""
    found: list[str] = field(default_factory=list)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--call", action="store_true", help="also record a call, and count the modules that it runs")
    parser.add_argument("--names", action="store_true", help="also the files and classes behind each figure")
    asked = parser.parse_args()
    figures = shape_of(read_source())
    if asked.call:
        figures += asyncio.run(walk_of_a_call())
    for figure in figures:
        print(f"{figure.value:>7,}  {figure.name}: {figure.how}")
        for found in figure.found if asked.names else ():
            print(f"           {found}")
    print(json.dumps({"figures": {figure.name: figure.value for figure in figures}}))


def read_source(source: Path = SOURCE) -> list[Module]:
    paths = sorted(source.rglob("*.py"))
    texts = [(str(path.relative_to(source)), path.read_text()) for path in paths]
    return [Module(path, text, ast.parse(text)) for path, text in texts]


def shape_of(modules: list[Module]) -> list[Figure]:
    pool = [module for module in modules if module.path.startswith("pool/")]
    comments, code = map(sum, zip(*map(comment_and_code_lines, modules), strict=True))
    has_all = f"Protocols all of whose methods {' or '.join(POOL_CLASSES)} has"
    one_importer = f"shorter than {SHORT_MODULE} lines, imported by one other module at most"
    return [
        Figure("modules", len(modules), "*.py below src/stepwell"),
        Figure("lines", sum(module.lines for module in modules), "of them, all lines"),
        Figure("code lines", code, "lines with code, without docstrings, comments and blank lines"),
        Figure("comments", comments, "lines with a comment"),
        Figure("pool modules", len(pool), "*.py below src/stepwell/pool"),
        Figure("pool lines", sum(module.lines for module in pool), "of them, all lines"),
        Figure("public names", sum(map(public_names, modules)), "functions and classes of modules without a leading _"),
        counted("long functions", flat(long_functions, modules), f"longer than {LONG_FUNCTION} lines"),
        counted("small modules", small_modules(modules), one_importer),
        *(figure for feature, pattern in FEATURES.items() for figure in files_that_name(modules, feature, pattern)),
        counted("pool protocols", pool_protocols(modules), has_all),
        counted("headless docstrings", flat(headless, modules), "docstrings that begin with 'Of '"),
    ]


def flat(find: Callable[[Module], list[str]], modules: list[Module]) -> list[str]:
    return [found for module in modules for found in find(module)]


def counted(name: str, found: list[str], how: str) -> Figure:
    return Figure(name, len(found), how, found)


def comment_and_code_lines(module: Module) -> tuple[int, int]:
    comments, code = set[int](), set[int]()
    for token in tokenize.generate_tokens(io.StringIO(module.text).readline):
        if token.type == tokenize.COMMENT:
            comments.add(token.start[0])
        elif token.type not in NO_CODE:
            code.update(range(token.start[0], token.end[0] + 1))
    for node in module.nodes():  # docstrings, also those of fields
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            code.difference_update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(comments), len(code)


def public_names(module: Module) -> int:
    return sum(isinstance(node, (*FUNCTIONS, ast.ClassDef)) and node.name[0] != "_" for node in module.tree.body)


def long_functions(module: Module) -> list[str]:
    sizes = [
        ((node.end_lineno or 0) - node.lineno + 1, node.name) for node in module.nodes() if isinstance(node, FUNCTIONS)
    ]
    return [f"{module.path} {name}: {size} lines" for size, name in sizes if size > LONG_FUNCTION]


def small_modules(modules: list[Module]) -> list[str]:
    names = {module.name for module in modules}
    importers: dict[str, set[str]] = {}
    for module in modules:
        for imported in imports_of(module, names):
            importers.setdefault(imported, set()).add(module.name)
    return [
        f"{module.path}: {module.lines} lines"
        for module in modules
        if not module.is_package and module.lines < SHORT_MODULE and len(importers.get(module.name, ())) <= 1
    ]


def imports_of(module: Module, names: set[str]) -> Iterator[str]:
    for node in module.nodes():
        if isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield inner if inner in names else node.module
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def files_that_name(modules: list[Module], feature: str, pattern: str) -> list[Figure]:
    named = [module.path for module in modules if any(re.search(pattern, name, re.I) for name in identifiers(module))]
    told = [module.path for module in modules if re.search(pattern, module.text, re.I)]
    return [
        counted(f"files that name {feature}", named, f"/{pattern}/i in an identifier or an import"),
        counted(f"files that tell of {feature}", told, f"/{pattern}/i anywhere in the text"),
    ]


def identifiers(module: Module) -> Iterator[str]:
    for node in module.nodes():
        for attribute in ("id", "attr", "name", "arg", "module"):
            if isinstance(name := getattr(node, attribute, None), str):
                yield name


def pool_protocols(modules: list[Module]) -> list[str]:
    classes = {node.name: node for module in modules for node in module.tree.body if isinstance(node, ast.ClassDef)}
    reached = [methods_of(name, classes) for name in POOL_CLASSES]
    protocols = {name: methods_of(name, classes) for name, node in classes.items() if "Protocol" in base_names(node)}
    return [name for name, own in protocols.items() if own and any(own <= methods for methods in reached)]


def methods_of(name: str, classes: dict[str, ast.ClassDef]) -> set[str]:
    """The methods of a class and of its bases in this package."""
    if name not in classes:
        return set()
    own = {node.name for node in classes[name].body if isinstance(node, FUNCTIONS) and not node.name.startswith("_")}
    return own.union(*(methods_of(base, classes) for base in base_names(classes[name])))


def base_names(node: ast.ClassDef) -> list[str]:
    return [ast.unparse(base).partition("[")[0].rpartition(".")[2] for base in node.bases]


def headless(module: Module) -> list[str]:
    return [
        f"{module.path}:{node.lineno}"
        for node in module.nodes()
        if isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
        and node.value.value.startswith("Of ")
    ]


async def walk_of_a_call() -> list[Figure]:
    """A chat call through a gateway to a pool, and from there to a tensor, in this process and without Ray."""
    sys.path[:0] = [str(CHECKOUT)]
    from rig.fake_engine import FakeEngine, Reply
    from rig.gateways import serve_gateway
    from rig.local_pool import LocalPool
    from rig.openai_agent import agent_of
    from rig.waiting import until

    pool = LocalPool()
    async with FakeEngine() as engine, serve_gateway(pool, [engine.url]) as url, agent_of(url) as agent:
        engine.replies.extend([Reply("first"), Reply("second")])
        await agent.ask()  # what is done once, by the first call, does not count
        recorded, fetched = set[str](), set[str]()
        arrived = pool.rules.stats().submitted + 1
        sys.setprofile(noting(recorded))
        await agent.ask(messages=[{"role": "user", "content": "and now?"}])
        await until(lambda: pool.rules.stats().submitted >= arrived, "the step in the pool", 10.0)
        sys.setprofile(None)
        await agent.complete(reward=1.0)
        sys.setprofile(noting(fetched))
        batch = await pool.fetch_batch(1, lease=60.0, untrainable=True, min_exactness="retokenized")
        batch.merged().padded(4096).to_torch()
        await pool.ack(batch)
        sys.setprofile(None)
    return [
        counted("modules of a recorded call", sorted(recorded), "that run from the agent's request to the pool"),
        counted("modules of a fetch", sorted(fetched), "that run from the pool to a tensor"),
        counted("modules of both", sorted(recorded | fetched), "from the socket to a tensor"),
    ]


def noting(modules: set[str]) -> Callable[[FrameType, str, Any], None]:
    """A profiler that adds the modules of this package whose functions run."""

    def note(frame: FrameType, event: str, _: Any) -> None:
        file = frame.f_code.co_filename
        if event == "call" and file.startswith(str(SOURCE)):
            modules.add(str(Path(file).relative_to(SOURCE)))

    return note


if __name__ == "__main__":
    main()
