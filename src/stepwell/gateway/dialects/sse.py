"""Server-sent events: bytes to events and back.

- An event is returned whole or not at all, in the order of arrival, as soon as its last byte is there.
- Comments are dropped: the gateway writes its own.
"""

from stepwell.errors import EngineUnavailable

MEDIA_TYPE = "text/event-stream; charset=utf-8"
DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"
LONGEST_EVENT = 64 * 1024 * 1024


def event(payload: bytes) -> bytes:
    return b"data: " + payload + b"\n\n"


class EventReader:
    """Splits a stream into the payloads of its events."""

    def __init__(self, longest: int = LONGEST_EVENT) -> None:
        self._longest = longest
        self._held: list[bytes] = []
        """The parts of an event that is not whole yet."""
        self._held_bytes = 0

    def feed(self, data: bytes) -> list[bytes]:
        """The payloads of the events that `data` completes."""
        if not self._held and data.startswith(b"data: {") and data.endswith(b"\n\n"):
            payloads = data[6:-2].split(b"\n\ndata: ")
            if data.count(b"\n") == 2 * len(payloads) and all(payloads):  # whole events of one line: the usual case
                payloads[-1] = payloads[-1].strip()
                return payloads
        if b"\n" not in data:
            self._hold(data)
            return []
        if self._held:
            data = self._release() + data
        if b"\r" in data:
            data = data.replace(b"\r\n", b"\n")
        *events, rest = data.split(b"\n\n")
        if rest:
            self._hold(rest)
        return _payloads(events)

    def end(self) -> list[bytes]:
        """The payload of a last event that has no blank line after it."""
        return _payloads([self._release()])

    def _hold(self, data: bytes) -> None:
        self._held.append(data)
        self._held_bytes += len(data)
        if self._held_bytes > self._longest:
            raise EngineUnavailable("the engine's stream has an event that is too long")

    def _release(self) -> bytes:
        data = b"".join(self._held)
        self._held, self._held_bytes = [], 0
        return data


def _payloads(events: list[bytes]) -> list[bytes]:
    return [payload for one in events if (payload := _payload(one))]


def _payload(one: bytes) -> bytes:
    return b"\n".join([line[5:] for line in one.split(b"\n") if line.startswith(b"data:")]).strip()
