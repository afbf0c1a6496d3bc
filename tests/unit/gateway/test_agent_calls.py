import asyncio
import json

from stepwell.gateway.calls import send_error
from stepwell.gateway.error_responses import describe
from stepwell.gateway.requests import Message
from stepwell.gateway.response_writer import ResponseWriter

from stepwell.errors import EngineUnavailable, Overloaded
from stepwell.gateway.dialects.openai_choices import DONE
from tests.unit.gateway.dialects.asking import CHAT, chat


class Sent:
    """What a client was sent."""

    def __init__(self) -> None:
        self.messages: list[Message] = []

    async def send(self, message: Message) -> None:
        self.messages.append(message)

    def writer(self) -> ResponseWriter:
        return ResponseWriter(self.send, asyncio.get_running_loop().time)

    @property
    def body(self) -> bytes:
        return b"".join(message["body"] for message in self.messages[1:])


async def test_a_failure_is_an_http_error_before_the_first_byte() -> None:
    sent = Sent()
    await send_error(sent.writer(), CHAT, describe(Overloaded("too many")))
    start, body = sent.messages
    assert (start["status"], dict(start["headers"])[b"Retry-After"], body["more_body"]) == (429, b"1", False)
    assert json.loads(sent.body)["error"]["message"] == "too many"


async def test_a_failure_is_an_error_event_after_it() -> None:
    sent, stream = Sent(), CHAT.stream(chat(stream=True))
    writer = sent.writer()
    await writer.write(b"data: 1\n\n")
    await send_error(writer, CHAT, describe(EngineUnavailable("it broke")), stream)
    first, event, done = sent.body.split(b"\n\n", 2)
    assert (first, done) == (b"data: 1", DONE)
    assert json.loads(event.removeprefix(b"data: "))["error"]["code"] == "engine_unavailable"
    assert [message["more_body"] for message in sent.messages[1:]] == [True, False]


async def test_nothing_follows_the_end_of_a_response() -> None:
    for stream in (None, CHAT.stream(chat(stream=True))):
        sent = Sent()
        writer = sent.writer()
        await writer.whole(200, b"{}")
        await send_error(writer, CHAT, describe(EngineUnavailable("it broke")), stream)
        assert (len(sent.messages), sent.body) == (2, b"{}")
