"""Hostile clients: one attack by name, until the time is over. They need one trajectory's key at most.

python -m benchmarks.attacks_rig.attackers ATTACK PORT PATH KEY SECONDS
"""

import asyncio
import sys
from collections.abc import Awaitable, Callable
from contextlib import suppress

HOST = "127.0.0.1"
NESTED = b'{"model": "tiny", "messages": [' + b"[]," * (20 * 2**20) + b"[]]}"
"""60 MiB that become more than a gigabyte of objects."""
LONG_NAME = "n" * 60_000


UNDER_WAY = "under way"


class Attack:
    def __init__(self, port: int, path: str, key: str, count: int) -> None:
        self.port, self.path, self.key = port, path, key
        self._to_begin = count
        """Connections."""

    def head(self, size: int, path: str | None = None) -> bytes:
        lines = (
            f"POST {path or self.path} HTTP/1.1",
            f"Host: {HOST}:{self.port}",
            f"Authorization: Bearer {self.key}",
            "Content-Type: application/json",
            f"Content-Length: {size}",
        )
        return "\r\n".join((*lines, "\r\n")).encode()

    async def send(self, *parts: bytes, pause: float = 0.0) -> None:
        """On a connection of its own, then wait for the answer."""
        with suppress(OSError, asyncio.IncompleteReadError):
            reader, writer = await asyncio.open_connection(HOST, self.port)
            try:
                for place, part in enumerate(parts):
                    writer.write(part)
                    await writer.drain()
                    if place == 0:
                        self._say_when_all_have_begun()
                    await asyncio.sleep(pause)
                await reader.read(1024)
            finally:
                writer.close()

    def _say_when_all_have_begun(self) -> None:
        self._to_begin -= 1
        if self._to_begin == 0:
            print(UNDER_WAY, flush=True)

    async def nested(self) -> None:
        """A body of many empty lists."""
        await self.send(self.head(len(NESTED)), NESTED)

    async def headers(self) -> None:
        """Header lines without an end, without a key."""
        await self.send(b"POST / HTTP/1.1\r\n", *[b"X-More: x\r\n" * 1_000] * 1_000)

    async def names(self) -> None:
        """Calls for trajectories with long names, each another one."""
        name = f"{LONG_NAME}{id(asyncio.current_task())}{asyncio.get_running_loop().time()}"
        await self.send(self.head(2, f"/{name}/p/v1/chat/completions"), b"{}")

    async def slow(self) -> None:
        """A request that never ends."""
        await self.send(b"POST / HTTP/1.1\r\n", *[b"X"] * 3_600, pause=1.0)

    async def bodies(self) -> None:
        """Large bodies that never end."""
        await self.send(self.head(60 * 2**20), *[b" " * 2**20] * 59, pause=0.05)
        await asyncio.sleep(3_600)


ATTACKS: dict[str, tuple[Callable[[Attack], Awaitable[None]], int]] = {
    "nested": (Attack.nested, 4),
    "headers": (Attack.headers, 8),
    "names": (Attack.names, 8),
    "slow": (Attack.slow, 500),
    "bodies": (Attack.bodies, 30),
}
"""With how many connections at once."""


async def run(name: str, port: int, path: str, key: str, seconds: float) -> None:
    act, count = ATTACKS[name]
    attack = Attack(port, path, key, count)

    async def again_and_again() -> None:
        while True:
            await act(attack)
            await asyncio.sleep(0.01)

    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await asyncio.gather(*(again_and_again() for _ in range(count)))


if __name__ == "__main__":
    name, port, path, key, seconds = sys.argv[1:]
    asyncio.run(run(name, int(port), path, key, float(seconds)))
