"""Messages between a worker and its children, as frames of common/child.py: first the Job.

Samples go to the child as pickles. A child runs untrusted code, so its replies are JSON.
"""

from dataclasses import dataclass, field

from stepwell.rewards.confinement.sandbox import SandboxLevel
from stepwell.steps.step import JsonObject


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """The job that a child process is started for."""

    function: str
    """The name of the function, as rewards/loading.py reads it."""
    options: JsonObject = field(default_factory=dict)
    """The options of a built-in function."""
    folder: str = "."
    """The folder where the function runs, and where files and modules are searched first; absolute if workers run on
    other nodes."""
    tokenizer_path: str | None = None
    """Folder or name of the Hugging Face tokenizer; without one, functions that read texts fail."""
    timeout: float = 30.0
    """Seconds that one call may take."""
    memory_mb: int = 2_048
    """Memory of a process beyond what it uses before the function is loaded."""
    children: int = 2
    """Processes."""
    sandbox: SandboxLevel = SandboxLevel.STRICT
    """Where generated code runs."""
    calls: int = 512
    """Concurrent calls of an async function, over all processes."""
