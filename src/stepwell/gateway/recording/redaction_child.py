"""The process in which a redaction function runs: `python -m stepwell.gateway.recording.redaction`.

Its standard input is a socket to the gateway. It gets a RedactionJob, answers with the id of the mask or with the
reason why there is none, and then answers every list of tasks with a list of findings, or with the name of the
exception. The text of an exception is never sent: it may have what must not be stored.
"""

import socket
from typing import Any, NamedTuple

import msgpack

from stepwell.common.async_calls import is_async
from stepwell.common.child import framed, read_frame_from
from stepwell.common.imports import load_member
from stepwell.common.tokenizers import LoadedTokenizer
from stepwell.errors import BadRequest, StepwellError
from stepwell.gateway.recording.redaction import FindSpans, RedactionTask, SpanFinder, mask_id


class RedactionJob(NamedTuple):
    function: str
    """The address of the function: module:function or path/to/file.py:function."""
    tokenizer_path: str


def packed(message: object) -> bytes:
    raw: bytes = msgpack.packb(message, unicode_errors="surrogatepass")
    return raw


def unpacked(raw: bytes) -> Any:
    """Lists and named tuples come as tuples."""
    return msgpack.unpackb(raw, use_list=False, unicode_errors="surrogatepass")


def load_redaction(name: str) -> FindSpans:
    """BadRequest says why there is no such function."""
    name, function = load_member(name)
    if not callable(function) or is_async(function):
        raise BadRequest(f"{name} is no plain function; it takes a text and returns the spans (start, end) to mask")
    return function


def main() -> None:
    with socket.socket(fileno=0) as channel, channel.makefile("rb") as stream:
        job = RedactionJob(*unpacked(read_frame_from(stream) or b""))
        try:
            tokenizer = LoadedTokenizer.load(job.tokenizer_path)
            finder, mask = SpanFinder(load_redaction(job.function), tokenizer), mask_id(tokenizer)
        except StepwellError as why:
            channel.sendall(framed(packed(str(why))))
            return
        channel.sendall(framed(packed(mask)))
        while (tasks := read_frame_from(stream)) is not None:
            channel.sendall(framed(packed(_answer(finder, unpacked(tasks)))))


def _answer(finder: SpanFinder, tasks: Any) -> object:
    try:
        return [finder.find(RedactionTask(*task)) for task in tasks]
    except Exception as failure:  # noqa: BLE001 - it is the user's function
        return type(failure).__name__


if __name__ == "__main__":
    main()
