"""Facts about its steps that the texts of a request tell.

Side calls are calls that an agent's harness makes for itself: titles, memory, summaries. They must not get the task's
reward. A rule recognises a side call by the exact beginning of the harness's own prompt. Prompts that nobody has listed
are missed. The opposite mistake would lose training data silently, so no rule guesses from a topic. The header
`x-stepwell-call` decides over every rule. An agent that writes its own prompts can imitate a side call: a channel may
count marked ones only.

Markers are texts that look like a chat template's. An engine reads such text as markers: a message can hold what seems
to be several turns. Nobody can tell them from real ones later, so the step says that its turns are not to be read.
"""

import re
from dataclasses import dataclass
from typing import Any

from stepwell.errors import BadRequest
from stepwell.gateway.dialects.dialect import ModelCall, PromptTexts
from stepwell.steps.conversation import MARKERS
from stepwell.wire.openai import Upstream

CALL_HEADER = "x-stepwell-call"
"""The request's own statement of what it is: "task" or "side"."""
MARKED = "marked"
"""The kind of a side call that only the header tells."""
ESCAPED = (b"\\u003", b"\\u007")
"""How < and | begin where a JSON text escapes them."""
DEPTH = 12
"""How deep objects and lists of a message are searched; what is deeper counts as a marker."""
CLAUDE_CODE_FIRST = re.compile(
    r"(?:x-anthropic-billing-header:.*\n+)?(?:You are (?:Claude Code|a Claude agent), .*\n+)?"
)
"""Lines that Claude Code puts before every system prompt, also before that of a side call."""


@dataclass(frozen=True, slots=True)
class SideCallRule:
    kind: str
    seen_in: str
    """The harnesses whose prompt begins like this; others have copied it from them."""
    opening: str
    max_tokens: int | None = None
    """None: any."""


SYSTEM_RULES = (
    SideCallRule("title", "opencode", "You are a title generator. You output ONLY a thread title"),
    SideCallRule(
        "title", "Claude Code, qwen-code", "Generate a concise, sentence-case title (3-7 words) that captures"
    ),
    SideCallRule("title", "Claude Code, qwen-code", "Generate a short kebab-case name (2-4 words) that captures"),
    SideCallRule("memory", "qwen-code", "You are now acting as the managed memory extraction subagent"),
    SideCallRule("memory", "qwen-code", "You are performing a managed memory dream"),
    SideCallRule("memory", "qwen-code", "You are reviewing this conversation to extract reusable skills."),
    SideCallRule("memory", "Claude Code, qwen-code", "You are selecting memories that will be useful to "),
    SideCallRule("summary", "opencode", "You are a context summarization agent. You are given a conversation between"),
    SideCallRule("summary", "opencode", "Summarize what was done in this conversation. Write like a pull request"),
    SideCallRule("summary", "qwen-code", "You are the component that summarizes internal chat history into a given"),
    SideCallRule(
        "summary", "Gemini CLI", "You are a specialized system component responsible for distilling chat history"
    ),
    SideCallRule(
        "summary", "pi, OpenClaw", "You are a context summarization assistant. Your task is to read a conversation"
    ),
    SideCallRule("summary", "aider", "*Briefly* summarize this partial conversation about programming."),
    SideCallRule("recap", "qwen-code", "You generate session recaps for a programming assistant CLI."),
    SideCallRule("label", "Claude Code, qwen-code", "Write a short summary label describing what these tool calls"),
)
"""The rules for the first message, if it is a system or developer message."""

USER_RULES = (
    SideCallRule(
        "title", "Claude Code", "You are coming up with a succinct title and git branch name for a coding session"
    ),
    SideCallRule(
        "title",
        "Codex",
        "You are a helpful assistant. You will be presented with a user prompt, and your job is to "
        "provide a short title",
    ),
    SideCallRule(
        "title", "Open WebUI", "### Task:\nGenerate a concise, 3-5 word title with an emoji summarizing the chat"
    ),
    SideCallRule("tags", "Open WebUI", "### Task:\nGenerate 1-3 broad tags categorizing the main themes of the chat"),
    SideCallRule(
        "suggestion", "Open WebUI", "### Task:\nSuggest 3-5 relevant follow-up questions or prompts that the user"
    ),
    SideCallRule(
        "suggestion", "Claude Code, qwen-code", "[SUGGESTION MODE: Suggest what the user might naturally type next"
    ),
    SideCallRule("memory", "Claude Code", "You are now acting as the memory extraction subagent."),
    SideCallRule("memory", "Claude Code", "# Dream: Memory Consolidation"),
    SideCallRule(
        "summary", "Claude Code", "Your task is to create a detailed summary of the conversation so far, paying close"
    ),
    SideCallRule(
        "summary", "Claude Code", "CRITICAL: Respond with TEXT ONLY. Do NOT call any tools.\n\n- Do NOT use Read, Bash"
    ),
    SideCallRule("summary", "Codex", "You are performing a CONTEXT CHECKPOINT COMPACTION."),
    SideCallRule("summary", "LangChain", "<role>\nContext Extraction Assistant\n</role>"),
    SideCallRule("recap", "Claude Code", "The user stepped away and is coming back. Recap in under "),
    SideCallRule(
        "next_speaker", "qwen-code", "Analyze *only* the content and structure of your immediately preceding response"
    ),
    SideCallRule("command_check", "Claude Code", "<policy_spec>\n# Claude Code"),
    SideCallRule("quota_probe", "Claude Code", "quota", max_tokens=1),
)
"""The rules for the user's last message."""

OPENINGS = tuple(rule.opening for rule in (*SYSTEM_RULES, *USER_RULES))


def side_call_kind(texts: PromptTexts, max_tokens: int, header: str | None, *, by_text: bool = True) -> str | None:
    """The kind of side call, or None for a call of the task. `header` is the value of CALL_HEADER. Without `by_text`,
    the header alone counts."""
    if header is not None:
        if header not in ("task", "side"):
            raise BadRequest(f'the header {CALL_HEADER} is "task" or "side", not {header!r}')
        return MARKED if header == "side" else None
    if not by_text:
        return None
    first = CLAUDE_CODE_FIRST.match(texts.system)
    return _kind(SYSTEM_RULES, texts.system[first.end() if first else 0 :], max_tokens) or _kind(
        USER_RULES, texts.user, max_tokens
    )


def _kind(rules: tuple[SideCallRule, ...], text: str, max_tokens: int) -> str | None:
    if not text.startswith(OPENINGS):
        return None
    for rule in rules:
        if text.startswith(rule.opening) and rule.max_tokens in (None, max_tokens):
            return rule.kind
    return None


def writes_markers(call: ModelCall, raw: bytes) -> bool:
    """Whether a message or tool of a chat call writes a marker. A completion's prompt is the agent's own template."""
    if call.upstream is not Upstream.CHAT:
        return False
    if call.part is None and not _may_write_markers(raw):
        return False
    return _has_marker(call.request["messages"]) or _has_marker(call.request.get("tools"))


def _may_write_markers(raw: bytes) -> bool:
    """Quick: one character, or a long text, is found several times as fast as two characters."""
    return (b"|" in raw and b"<|" in raw) or (b"\\u00" in raw and any(escaped in raw for escaped in ESCAPED))


def _has_marker(value: Any, depth: int = 0) -> bool:
    if isinstance(value, str):
        return "<|" in value and any(marker in value for marker in MARKERS)
    if isinstance(value, dict):
        value = [*value.keys(), *value.values()]
    if isinstance(value, list):
        return depth > DEPTH or any(_has_marker(each, depth + 1) for each in value)
    return False
