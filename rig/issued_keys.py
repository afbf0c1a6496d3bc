"""A key of each role, and requests that are answered without an effect where they are let in."""

from dataclasses import dataclass
from pathlib import Path

from stepwell.access.access_keys import AccessKeys
from stepwell.access.caller import Role
from stepwell.access.key_file import KeyFile, create_key

CONTROL = "control-key-of-the-tests"


@dataclass(frozen=True)
class IssuedKeys:
    file: KeyFile
    path: Path
    by_role: dict[Role, str]
    """One of each role that a key file can have."""

    def access(self) -> AccessKeys:
        return AccessKeys([CONTROL], self.file)


def issue_keys(folder: Path) -> IssuedKeys:
    path = folder / "keys.json"
    by_role: dict[Role, str] = {role: create_key(path, role)[0] for role in Role if role is not Role.TRAJECTORY}
    return IssuedKeys(KeyFile(path, interval=0.0), path, by_role)


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}
