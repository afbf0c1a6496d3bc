"""Rules and slices read the state and call its operations; of it they change nothing by themselves."""

import ast
from pathlib import Path

import pytest

import stepwell.pool.rules
import stepwell.pool.slices

SLICES = sorted(Path(stepwell.pool.slices.__path__[0]).glob("*.py"))
MODULES = [*sorted(Path(stepwell.pool.rules.__path__[0]).glob("*.py")), *SLICES]
KEPT_INSIDE = ("journal", "change_log", "ledger", "counters", "reward_queue", "series")
"""Modules of pool/state that only PoolState calls."""
MUTATORS = ("ChannelIndex", "ChangeLog", "RewardQueue", "Ledger", "Counters", "SeriesRecorder")


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.stem)
def test_a_rule_names_no_journal_log_or_index(path: Path) -> None:
    hands_on = path.stem == "pool" or path in SLICES  # a slice has rows and records of its own
    allowed = {"stepwell.pool.state.journal"} if hands_on else set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module not in allowed:
            package, _, module = str(node.module).rpartition(".")
            assert package != "stepwell.pool.state" or module not in KEPT_INSIDE
            assert not {alias.name for alias in node.names} & set(MUTATORS)
        if isinstance(node, ast.Attribute) and not (isinstance(node.value, ast.Name) and node.value.id == "self"):
            is_private = node.attr.startswith("_") and ast.unparse(node) != "super().__init__"
            assert not is_private, f"line {node.lineno}: another object's private {node.attr}"
            assert node.attr not in KEPT_INSIDE or hands_on


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.stem)
def test_a_rule_writes_no_attribute_of_another_object(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text())):
        targets = node.targets if isinstance(node, ast.Assign | ast.Delete) else []
        targets = [node.target] if isinstance(node, ast.AugAssign | ast.AnnAssign) else targets
        for target in [part for found in targets for part in ast.walk(found)]:
            if isinstance(target, ast.Attribute) and isinstance(target.ctx, ast.Store | ast.Del):
                is_own = ast.unparse(target.value) in {"self"} | OWN.get(path.stem, set())
                assert is_own, f"line {target.lineno}: {ast.unparse(target)} is written"


OWN = {
    "exact_batch": {"pile"},
    "forgetting": {"tombstone"},
    "forgetting_work": {"tombstone", "removal.tombstone", "archive"},
}
"""An exact batch is computed from values of its own; tombstones are the records of forgetting, which pauses the archive
while it rewrites its files."""
