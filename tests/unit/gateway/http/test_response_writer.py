import asyncio
from typing import Any

import pytest
from stepwell.gateway.requests import Message
from stepwell.gateway.response_writer import KeepAlives, ResponseWriter, SharedResponse

from rig.waiting import until
from stepwell.errors import EngineUnavailable

KEEP_ALIVE = b": alive\n\n"
END = b"data: end\n\n"
STREAM_HEADERS = [(b"content-type", b"text/x-events"), (b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")]


class Client:
    """What reached it, and a switch that keeps it from reading."""

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self.reads = asyncio.Event()
        self.reads.set()

    async def send(self, message: Message) -> None:
        await self.reads.wait()
        self.messages.append(message)

    @property
    def status(self) -> Any:
        return self.messages[0]["status"]

    @property
    def headers(self) -> dict[bytes, bytes]:
        return dict(self.messages[0]["headers"])

    @property
    def body(self) -> bytes:
        return b"".join(message["body"] for message in self.messages[1:])

    @property
    def is_complete(self) -> bool:
        kinds = [message["type"] for message in self.messages]
        more = [message["more_body"] for message in self.messages[1:]]
        assert kinds[:1] == ["http.response.start"]
        assert set(kinds[1:]) <= {"http.response.body"}
        assert all(more[:-1]), "nothing follows the last part"
        return bool(more) and not more[-1]


def make_answer(client: Client) -> ResponseWriter:
    writer = ResponseWriter(client.send, asyncio.get_running_loop().time)
    writer.media_type = "text/x-events"
    return writer


def keep_alive() -> bytes:
    return KEEP_ALIVE


async def test_a_whole_answer_has_its_length_and_headers() -> None:
    client = Client()
    answer = make_answer(client)
    assert answer.status == 0
    await answer.whole(429, b"{}", {"Retry-After": "1"})
    assert (client.status, client.body, answer.status) == (429, b"{}", 429)
    assert client.headers[b"content-length"] == b"2"
    assert client.headers[b"Retry-After"] == b"1"
    assert client.is_complete
    assert answer.first_byte_at is None


async def test_a_stream_begins_with_its_first_piece_and_ends_with_its_last() -> None:
    client = Client()
    answer = make_answer(client)
    await answer.write(b"data: 1\n\n")
    assert (client.status, list(client.headers.items())) == (200, STREAM_HEADERS)
    first = answer.first_byte_at
    assert first is not None
    await answer.write(b"data: 2\n\n")
    assert answer.first_byte_at == first
    assert not client.is_complete
    await answer.end(END)
    assert client.body == b"data: 1\n\ndata: 2\n\n" + END
    assert client.is_complete


async def test_a_stream_that_has_nothing_but_an_end_is_a_stream_too() -> None:
    client = Client()
    await make_answer(client).end(END)
    assert (client.status, client.body, client.is_complete) == (200, END, True)


async def test_a_follower_answers_what_the_leader_answers() -> None:
    leading, following = Client(), Client()
    leader, follower, shared = make_answer(leading), make_answer(following), SharedResponse(lambda: None)
    leader.share(shared)
    follow = asyncio.create_task(follower.follow(shared))
    await leader.write(b"data: 1\n\n")
    await until(lambda: following.messages[1:] != [], "the first piece")
    await leader.end(END)
    await follow
    assert following.messages == leading.messages
    late = Client()
    await make_answer(late).follow(shared)
    assert late.messages == leading.messages


async def test_a_follower_gets_a_whole_answer_as_the_leader_got_it() -> None:
    leading, following, shared = Client(), Client(), SharedResponse(lambda: None)
    leader = make_answer(leading)
    leader.share(shared)
    await leader.whole(429, b"{}", {"Retry-After": "1"})
    await make_answer(following).follow(shared)
    assert following.messages == leading.messages


@pytest.mark.parametrize("sent", [[], [b"data: 1\n\n"]])
async def test_a_follower_is_told_when_its_leader_is_broken_off(sent: list[bytes]) -> None:
    shared = SharedResponse(lambda: None)
    leader, client = make_answer(Client()), Client()
    leader.share(shared)
    for part in sent:
        await leader.write(part)
    shared.give_up()
    with pytest.raises(EngineUnavailable, match="ask again"):
        await make_answer(client).follow(shared)
    assert len(client.messages) == len(sent) * 2


async def test_what_followers_get_does_not_wait_for_a_leader_that_does_not_read() -> None:
    leading, following, shared = Client(), Client(), SharedResponse(lambda: None)
    leader = make_answer(leading)
    leader.share(shared)
    await leader.write(b"data: 1\n\n")
    leading.reads.clear()
    writing = asyncio.create_task(leader.end(END))
    await make_answer(following).follow(shared)
    assert following.is_complete
    leading.reads.set()
    await writing


@pytest.fixture
async def keep_alives() -> Any:
    """Comments after 30 ms of silence."""
    alive = KeepAlives(0.03)
    running = asyncio.create_task(alive.run())
    yield alive
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def test_a_silent_stream_is_kept_alive_before_and_after_its_first_byte(keep_alives: KeepAlives) -> None:
    client = Client()
    answer = make_answer(client)
    keep_alives.add(answer, keep_alive)
    await until(lambda: client.messages != [] and client.body.startswith(KEEP_ALIVE), "a comment before all else")
    await answer.write(b"data: 1\n\n")
    await until(lambda: client.body.endswith(b"data: 1\n\n" + KEEP_ALIVE), "a comment after it")
    await answer.end(END)
    assert client.is_complete


async def test_no_comment_follows_the_end_or_reaches_who_has_left(keep_alives: KeepAlives) -> None:
    ended, gone, open_ = Client(), Client(), Client()
    first, second, third = make_answer(ended), make_answer(gone), make_answer(open_)
    for answer in (first, second, third):
        keep_alives.add(answer, keep_alive)
    keep_alives.discard(second)
    await first.end(END)
    await until(lambda: open_.messages != [] and open_.body.count(KEEP_ALIVE) >= 3, "comments to the open one")
    assert ended.body == END
    assert gone.messages == []


async def test_a_client_that_does_not_read_holds_up_no_other(keep_alives: KeepAlives) -> None:
    stuck, reading = Client(), Client()
    stuck.reads.clear()
    for client in (stuck, reading):
        keep_alives.add(make_answer(client), keep_alive)
    await until(lambda: reading.messages != [] and reading.body.count(KEEP_ALIVE) >= 3, "comments to who reads")
    stuck.reads.set()
    await until(lambda: stuck.messages != [] and stuck.body.startswith(KEEP_ALIVE), "the one comment that waited")
