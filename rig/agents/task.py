"""The task of TaskEngine in the tools of each harness: read a file, edit it, run a command."""

from collections.abc import Callable, Mapping

from rig.fake_engine import ToolCall

LOOK = "env > env.txt; cat note.txt"
ERRAND = "Read the note and tell me its word."
"""The prompt of a sub-agent."""


def claude_code(note: str) -> list[ToolCall]:
    return [
        ToolCall("Read", {"file_path": note}),
        ToolCall("Edit", {"file_path": note, "old_string": "heron", "new_string": "egret"}),
        ToolCall("Bash", {"command": LOOK, "description": "Look at the note"}),
    ]


def codex(note: str) -> list[ToolCall]:
    commands = [f"cat {note}", f"sed -i s/heron/egret/ {note}", LOOK]
    return [ToolCall("exec_command", {"cmd": command}) for command in commands]


def openclaw(note: str) -> list[ToolCall]:
    return [
        ToolCall("read", {"path": note}),
        ToolCall("edit", {"path": note, "edits": [{"oldText": "heron", "newText": "egret"}]}),
        ToolCall("exec", {"command": LOOK}),
    ]


def opencode(note: str) -> list[ToolCall]:
    return [
        ToolCall("read", {"filePath": note}),
        ToolCall("edit", {"filePath": note, "oldString": "heron", "newString": "egret"}),
        ToolCall("bash", {"command": LOOK, "description": "Look at the note"}),
    ]


def qwen_code(note: str) -> list[ToolCall]:
    return [
        ToolCall("read_file", {"file_path": note}),
        ToolCall("edit", {"file_path": note, "old_string": "heron", "new_string": "egret"}),
        ToolCall("run_shell_command", {"command": LOOK, "is_background": False}),
    ]


CALLS: Mapping[str, Callable[[str], list[ToolCall]]] = {
    "claude-code": claude_code,
    "codex": codex,
    "openclaw": openclaw,
    "opencode": opencode,
    "qwen-code": qwen_code,
}
"""By harness; given the path of the note."""


def claude_code_delegates(note: str) -> tuple[list[ToolCall], list[ToolCall]]:
    errand = {"description": "Read the note", "prompt": ERRAND, "run_in_background": False}
    look = ToolCall("Bash", {"command": LOOK, "description": "Look at the note"})
    return [ToolCall("Agent", errand), look], [ToolCall("Read", {"file_path": note})]


def opencode_delegates(note: str) -> tuple[list[ToolCall], list[ToolCall]]:
    errand = {"description": "Read the note", "prompt": ERRAND, "subagent_type": "general"}
    look = ToolCall("bash", {"command": LOOK, "description": "Look at the note"})
    return [ToolCall("task", errand), look], [ToolCall("read", {"filePath": note})]


DELEGATING: Mapping[str, Callable[[str], tuple[list[ToolCall], list[ToolCall]]]] = {
    "claude-code": claude_code_delegates,
    "opencode": opencode_delegates,
}
"""By harness: the calls of the agent, of which the first asks a sub-agent, and those of the sub-agent."""
