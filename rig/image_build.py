"""The steps of a Dockerfile, done one by one in file systems of their own, where no container daemon is.

- It knows the instructions that deploy/Dockerfile has; another one is an error.
- Every FROM names the same base image, which the caller gives as a folder, or a stage before it.
- COPY sees only what the .dockerignore lets through.
"""

import json
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from rig.clean_root import run_inside

NOT_DONE = frozenset({"EXPOSE"})
"""They change no file."""


@dataclass(frozen=True)
class Instruction:
    name: str
    flags: Mapping[str, str]
    rest: str


@dataclass
class Image:
    root: Path
    env: dict[str, str] = field(default_factory=dict)
    folder: str = "/"
    user: str = "0"
    entrypoint: list[str] = field(default_factory=list)
    command: list[str] = field(default_factory=list)
    health: list[str] = field(default_factory=list)

    def run(self, *command: str, **env: str) -> str:
        """Start a container: the entrypoint with this command, or with the image's own."""
        words = [*self.entrypoint, *(command or self.command)]
        return run_inside(self.root, words, env={**self.env, **env}, folder=self.folder, user=self.user)


def instructions(dockerfile: str) -> list[Instruction]:
    lines = [line for line in dockerfile.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n\s*", " ", "\n".join(lines))
    return [_instruction(line) for line in joined.splitlines()]


def _instruction(line: str) -> Instruction:
    name, _, rest = line.partition(" ")
    flags: dict[str, str] = {}
    while match := re.match(r"\s*--([\w-]+)=(\S+)\s*", rest):
        flags[match[1]] = match[2]
        rest = rest[match.end() :]
    return Instruction(name, flags, rest.strip())


def build_context(checkout: Path, ignored: str, target: Path) -> Path:
    """What a daemon would be sent: a .dockerignore that begins with * lists what is let through."""
    first, *patterns = [line for line in ignored.splitlines() if line and not line.startswith("#")]
    assert first == "*"
    never = [pattern.removeprefix("**/") for pattern in patterns if pattern.startswith("**/")]
    for pattern in patterns:
        if pattern.startswith("!"):
            source, copy = checkout / pattern[1:], target / pattern[1:]
            copy.parent.mkdir(parents=True, exist_ok=True)
            if source.is_dir():
                shutil.copytree(source, copy, ignore=shutil.ignore_patterns(*never))
            else:
                shutil.copy2(source, copy)
        else:
            assert pattern.startswith("**/"), pattern
    return target


def build_image(dockerfile: str, context: Path, base: Path, work: Path) -> Image:
    """The image of the last stage."""
    stages: dict[str, Image] = {}
    for number, (name, steps) in enumerate(_stages(instructions(dockerfile))):
        root = work / f"stage-{number}"
        subprocess.run(["cp", "--archive", "--reflink=auto", str(base), str(root)], check=True)
        image = stages[name] = Image(root)
        for step in steps:
            _do(step, image, context, stages)
    return image


def _stages(steps: list[Instruction]) -> Iterator[tuple[str, list[Instruction]]]:
    starts = [number for number, step in enumerate(steps) if step.name == "FROM"]
    assert starts[0] == 0
    for begin, end in zip(starts, [*starts[1:], len(steps)], strict=True):
        name = steps[begin].rest.partition(" AS ")[2]
        yield name or str(begin), steps[begin + 1 : end]


def _do(step: Instruction, image: Image, context: Path, stages: Mapping[str, Image]) -> None:
    match step.name:
        case "WORKDIR":
            image.folder = step.rest
            (image.root / step.rest.lstrip("/")).mkdir(parents=True, exist_ok=True)
        case "COPY":
            _copy(step, image, stages[step.flags["from"]].root if "from" in step.flags else context)
        case "RUN":
            words = ["sh", "-c", step.rest]
            run_inside(image.root, words, env=image.env, folder=image.folder, user=image.user)
        case "ENV":
            image.env |= dict(word.split("=", 1) for word in shlex.split(step.rest))
        case "USER":
            image.user = step.rest
        case "ENTRYPOINT":
            image.entrypoint = json.loads(step.rest)
        case "CMD":
            image.command = json.loads(step.rest)
        case "HEALTHCHECK":
            image.health = json.loads(step.rest.removeprefix("CMD "))
        case other:
            assert other in NOT_DONE, f"{other}: this replay does not know the instruction"


def _copy(step: Instruction, image: Image, source_root: Path) -> None:
    *sources, target = step.rest.split()
    to = image.root / str(Path(image.folder) / target).lstrip("/")
    is_folder = target.endswith("/") or target == "." or len(sources) > 1
    for source in sources:
        path = source_root / source.lstrip("/")
        assert path.exists(), f"COPY {source}: it is not in the build's context"
        if path.is_dir():
            to.mkdir(parents=True, exist_ok=True)
            subprocess.run(["cp", "--archive", f"{path}/.", str(to)], check=True)
            continue
        file = to / path.name if is_folder else to
        file.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, file)
        file.chmod(int(step.flags.get("chmod", "644"), 8))
