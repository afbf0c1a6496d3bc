"""Peer: one end of the connection between a candidate's process and its test's process.

- Requests nest: while one end waits for a reply it serves the requests of the other.
- Objects that cannot be copied stay where they are; the other end holds a RemoteObject. `Owner` decides which objects
  may be referred to, and what may be done with them.
"""

import json
import socket
import struct
from types import CoroutineType
from typing import Any, Protocol

from stepwell.rewards.harness.remote import LOOKING, exception_class, is_remote, make_proxy
from stepwell.rewards.harness.wire import Codec, ProtocolError

LENGTH = struct.Struct("<I")
MOST_BYTES = 2**25
"""In one message."""


class PeerEnded(BaseException):
    """The other process has ended. No test may catch this as an exception of the code."""


class Owner(Protocol):
    """What one process lets the other do with its objects."""

    def describe(self, value: Any) -> dict[str, Any]:
        """For the proxy: what the object is. TypeError if it must not be referred to."""

    def cannot_send(self, why: Exception) -> BaseException:
        """What to raise for a request with an argument that cannot be sent."""

    def perform(self, operation: str, arguments: tuple[Any, ...]) -> Any:
        """What the other process asks for."""

    def news(self) -> Any:
        """Plain data that goes with each message."""

    def take_news(self, news: Any) -> None: ...


class Peer:
    def __init__(self, channel: socket.socket, owner: Owner, *, is_test: bool) -> None:
        self._channel = channel
        self._owner = owner
        self._is_test = is_test
        self._codec = Codec(self, is_test=is_test)
        self._objects: list[Any] = []
        self._numbers: dict[int, int] = {}
        self._proxies: dict[int, Any] = {}
        self.failure = ""
        """Why the connection is useless, if it is."""

    def request(self, operation: str, *arguments: Any) -> Any:
        try:
            self._send("ask", operation, arguments)
        except (TypeError, ValueError, RecursionError) as why:
            failure = self._owner.cannot_send(why)
            if isinstance(failure, ProtocolError):
                self.failure = str(failure)
            raise failure from None
        was_frozen = self._codec.is_frozen
        self._codec.is_frozen = was_frozen or (self._is_test and operation in LOOKING)
        try:
            return self._answer(operation)
        finally:
            self._codec.is_frozen = was_frozen

    def _answer(self, asked: str) -> Any:
        while True:
            kind, operation, value = self._receive()
            if kind == "answer":
                return value
            if kind == "ask":
                self._serve(operation, value)
                continue
            failure = self._exception(value)
            if self._is_test and asked != "next" and isinstance(failure, StopIteration | StopAsyncIteration):
                raise RuntimeError(f"the code raised {type(failure).__name__}")  # else it ends a loop of the test
            raise failure

    def serve(self) -> None:
        """Until the other process ends."""
        while True:
            kind, operation, value = self._receive()
            if kind == "ask":
                self._serve(operation, value)

    def _serve(self, operation: str, arguments: tuple[Any, ...]) -> None:
        try:
            value = self._owner.perform(operation, arguments)
        except (PeerEnded, ProtocolError):
            raise
        except BaseException as failure:  # noqa: BLE001 - the other process gets it
            self._send("raise", "", self._describe_exception(failure))
            return
        try:
            self._send("answer", "", value)
        except (TypeError, ValueError, RecursionError, MemoryError) as failure:
            self._send("raise", "", self._describe_exception(failure))

    def _send(self, kind: str, operation: str, value: Any) -> None:
        message = self._codec.write((kind, operation, value, self._owner.news()))
        data = json.dumps(message).encode()
        if len(data) > MOST_BYTES:
            raise ValueError("a value is too large to leave its process")
        try:
            self._channel.sendall(LENGTH.pack(len(data)) + data)
        except OSError:
            raise self._ended() from None

    def _receive(self) -> tuple[str, str, Any]:
        (length,) = LENGTH.unpack(self._read(LENGTH.size))
        try:
            if length > MOST_BYTES:
                raise ProtocolError("a message is too long")
            try:
                message = json.loads(self._read(length))
            except (ValueError, RecursionError):
                raise ProtocolError("a message is not JSON") from None
            parts = self._codec.read(message)
            if type(parts) is not tuple or len(parts) != 4 or parts[0] not in ("ask", "answer", "raise"):
                raise ProtocolError("a message of no kind")
            kind, operation, value, news = parts
            self._take_news(news)
        except ProtocolError as wrong:
            self.failure = str(wrong)
            raise
        return kind, operation, value

    def _take_news(self, news: Any) -> None:
        try:
            self._owner.take_news(news)
        except Exception:  # noqa: BLE001 - a test must not take it for an exception of the code
            raise ProtocolError("news that cannot be read") from None

    def _read(self, size: int) -> bytes:
        data = bytearray()
        while len(data) < size:
            try:
                chunk = self._channel.recv(min(size - len(data), 2**20))
            except OSError:
                chunk = b""
            if not chunk:
                raise self._ended()
            data += chunk
        return bytes(data)

    def _ended(self) -> PeerEnded:
        self.failure = "ended before the test did"
        return PeerEnded(self.failure)

    # References, for the codec

    def write(self, value: Any) -> list[Any]:
        """ValueError, TypeError: it must not be referred to."""
        if is_remote(value):
            return ["yours", object.__getattribute__(value, "stepwell_number")]
        if isinstance(value, type | CoroutineType):
            for number, proxy in self._proxies.items():
                if proxy is value:
                    return ["yours", number]
        number = self._number_of(value)
        if isinstance(value, type) and issubclass(value, BaseException):
            return ["mine", number, dict(zip(("exception", "classes"), self._classes_of(value), strict=True))]
        return ["mine", number, self._owner.describe(value)]

    def read(self, written: list[Any]) -> Any:
        tag, number, *rest = written
        if type(number) is not int or number < 0:
            raise ProtocolError("no reference")
        if tag == "yours":
            return self._objects[number]
        if tag != "mine":
            raise ProtocolError(f"a value of unknown kind {tag!r}"[:100])
        if number not in self._proxies:
            self._proxies[number] = make_proxy(self, number, dict(rest[0]), self._proxies)
        return self._proxies[number]

    def _number_of(self, value: Any) -> int:
        number = self._numbers.get(id(value))
        if number is None:
            self._owner.describe(value)
            number = self._numbers[id(value)] = len(self._objects)
            self._objects.append(value)
        return number

    # Exceptions

    def _describe_exception(self, failure: BaseException) -> tuple[Any, ...]:
        """Its built-in base class, the classes between, and its arguments as far as they are plain."""
        base, classes = self._classes_of(type(failure))
        plain = tuple(arg if type(arg) in (int, float, str, bool) else _text(arg) for arg in failure.args[:10])
        return base, classes, plain

    def _classes_of(self, kind: type[BaseException]) -> tuple[str, tuple[Any, ...]]:
        """The name of its built-in base class; numbers and names of the classes before that one."""
        place = next(place for place, base in enumerate(kind.__mro__) if base.__module__ == "builtins")
        own = (each for each in kind.__mro__[:place] if issubclass(each, BaseException))
        return kind.__mro__[place].__name__, tuple((self._number_of(each), each.__name__) for each in own)

    def _exception(self, described: Any) -> BaseException:
        try:
            base, classes, arguments = described
            return _instance(exception_class(self._proxies, base, classes), arguments)
        except Exception:  # noqa: BLE001 - a test must not take it for an exception of the code
            self.failure = "an exception could not be read"
            raise ProtocolError(self.failure) from None


def _text(value: Any) -> str:
    try:
        return str(value)[:300]
    except BaseException:  # noqa: BLE001 - its class may be the candidate's
        return "(its text cannot be shown)"


def _instance(kind: type[BaseException], arguments: tuple[Any, ...]) -> BaseException:
    try:
        return kind(*arguments)
    except TypeError:  # SyntaxError, UnicodeDecodeError and their like want other arguments
        return ValueError(*arguments) if issubclass(kind, ValueError) else kind(arguments[0])
