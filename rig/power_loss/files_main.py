"""Writes files and folders in each way in which the package gives final names. Then it waits to be killed."""

import sys
from pathlib import Path

import fsspec
from stepwell.common.files import rename_folder, replacing_file, writing_under_temporary_name

CONTENT = b"content"


def write_all(folder: Path) -> None:
    fs = fsspec.filesystem("file")
    with replacing_file(folder / "replaced") as file:
        file.write(CONTENT)
    with writing_under_temporary_name(fs, str(folder / "deep" / "single")) as temporary:
        Path(temporary).write_bytes(CONTENT)
    with writing_under_temporary_name(fs, str(folder / "dataset")) as temporary:
        Path(temporary, "inner").mkdir(parents=True)
        Path(temporary, "inner", "part").write_bytes(CONTENT)
    (folder / "unfinished").mkdir()
    (folder / "unfinished" / "weights").write_bytes(CONTENT)
    rename_folder(folder / "unfinished", folder / "final")


if __name__ == "__main__":
    write_all(Path(sys.argv[1]))
    sys.stdout.write("written\n")
    sys.stdout.flush()
    sys.stdin.read()
