"""What a child process is started for. Both ends know it, so it stands by itself."""

from dataclasses import dataclass, field

from stepwell.steps.step import JsonObject


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    function: str
    """Its name, as rewards/loading.py reads it."""
    options: JsonObject = field(default_factory=dict)
    """For a built-in function."""
    folder: str = "."
    """Where it runs, and where files and modules are looked for first; absolute where workers are on other nodes."""
    tokenizer_path: str | None = None
    """Folder or name of the Hugging Face tokenizer; without one, functions that read texts fail."""
    timeout: float = 30.0
    """Seconds one call may take."""
    memory_mb: int = 2_048
    """What a process may take beyond what it has before the function is loaded."""
    children: int = 2
    """Processes."""
    calls: int = 512
    """Calls of an async function under way at once, over all processes."""
