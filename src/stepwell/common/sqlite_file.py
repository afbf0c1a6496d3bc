"""How many frames SQLite's write-ahead log holds, counted from its headers alone.

After a crash SQLite silently ignores frames at the end that belong to no committed transaction. Compared with what
SQLite says it recovered, this count tells how many those were.
"""

import struct
from pathlib import Path

HEADER, FRAME_HEADER = 32, 24


def torn_frames(database: Path) -> int:
    """Frames of the log's current generation, whole or torn; 0 if there is no log."""
    wal = database.with_name(database.name + "-wal")
    if not wal.exists():
        return 0
    with wal.open("rb") as file:
        header = file.read(HEADER)
        if len(header) < HEADER:
            return 0
        page_size, salt = struct.unpack(">I", header[8:12])[0], header[16:24]
        frames = 0
        while len(frame := file.read(FRAME_HEADER)) == FRAME_HEADER and frame[8:16] == salt:
            frames += 1
            file.seek(page_size, 1)
        return frames
