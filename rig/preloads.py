"""Small C libraries that are preloaded into processes, to give them faults of the machine below."""

import shutil
import subprocess
from pathlib import Path

RIG = Path(__file__).parent
SYNCED_ONLY = RIG / "power_loss" / "synced_only.c"
SHIFTED_CLOCK = RIG / "shifted_clock.c"


def has_compiler() -> bool:
    return shutil.which("gcc") is not None


def build(source: Path, folder: Path) -> Path:
    """The library, for LD_PRELOAD."""
    library = folder / f"{source.stem}.so"
    command = ["gcc", "-shared", "-fPIC", "-O1", "-o", str(library), str(source), "-ldl", "-lm", "-lpthread"]
    subprocess.run(command, check=True)
    return library


def preloaded(library: Path, **settings: Path) -> dict[str, str]:
    """The environment of a process with the library. Without the second variable, Ray's workers would not get it."""
    known = {name: str(value) for name, value in settings.items()}
    return {"LD_PRELOAD": str(library), "RAY_LD_PRELOAD_ON_WORKERS": "1", **known}
