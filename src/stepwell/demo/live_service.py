"""A chat service and its simulated users, as their own process, which uses only a gateway.

    python -m stepwell.demo.live_service ORDERS

It follows `talk` (users come, until `stop`) and `stop` (no more users come; it waits for those who are here). See
agent_process.py.

- Each user has a hidden preference that it never tells: it asks for a word, and wants the letters in an order that it
  does not name. Most users want it reversed.
- What a user thinks of a reply shows only in what it does next: it thanks, corrects, repeats its request, presses a
  thumb, or leaves without a word.
- The last word of a request is what is asked for, so that a request reads the same at every place of a conversation.
- Users are independent of each other: each place is taken by one user after another.
- The service opens a session for each conversation, calls the model with an OpenAI client, and never says that a
  session has ended.
"""

import asyncio
import random
import secrets
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from stepwell import logs
from stepwell.demo.agent_process import Orders, follow, sdk_client
from stepwell.demo.live_outcome import UserTurn, write_turn
from stepwell.demo.model import ScriptTurn

if TYPE_CHECKING:
    from openai import AsyncOpenAI
    from openai.types.chat import ChatCompletionMessageParam

LETTERS = "abcdefgh"
MINORITY = 0.03
"""Share of users who want the word as it is."""
REQUEST = "give me {}"
THANKS = ("thanks", "thank you", "perfect")
CORRECTIONS = ("no", "nope", "wrong")
CLOSINGS = frozenset((*THANKS, *CORRECTIONS))
REPEATING = 0.3
"""Share of rejections in which the user repeats the request, and says nothing else."""
MOST_REQUESTS = 4
CLOSING = 0.6
"""Share of users who close with a word of thanks or a correction."""
THUMBS = 0.2
"""Share of users who press a thumb instead. The others leave without a sign."""
REVERSED = 0.12
"""Share of the warm-up's answers that are right besides those that are so by chance."""
LENGTHS = 8
"""Batches of the warm-up that are sorted by length together."""
OK = "ok"
"""What an assistant says to a closing message."""
LONGEST_REPLY = 5
"""Tokens."""
THINKING = 0.2
"""Mean seconds between a reply and what its user does next."""


@dataclass(frozen=True, slots=True)
class Reaction:
    """What a user does after a reply."""

    accepted: bool | None
    """None: the reply to a closing message, which the user does not read."""
    message: str | None = None
    """What the user says next; None if the user leaves."""
    thumb: bool | None = None


class SimulatedUser:
    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._wants_reversed = rng.random() >= MINORITY
        self._requests = rng.randint(1, MOST_REQUESTS)
        self._word = ""
        self._is_leaving = False

    def opening(self) -> str:
        return self._next_request()

    def react(self, reply: str) -> Reaction:
        if self._is_leaving:
            return Reaction(None)
        accepted = reply == self.wanted
        self._requests -= 1
        if not self._requests:
            return self._leave(accepted)
        if accepted:
            return Reaction(True, f"{self._rng.choice(THANKS)}, {self._next_request()}")
        if self._rng.random() < REPEATING:
            return Reaction(False, self._request)
        return Reaction(False, f"{self._rng.choice(CORRECTIONS)}, {self._request}")

    @property
    def wanted(self) -> str:
        return self._word[::-1] if self._wants_reversed else self._word

    def _leave(self, accepted: bool) -> Reaction:
        self._is_leaving = True
        sign = self._rng.random()
        if sign < CLOSING:
            return Reaction(accepted, self._rng.choice(THANKS if accepted else CORRECTIONS))
        return Reaction(accepted, thumb=accepted if sign < CLOSING + THUMBS else None)

    def _next_request(self) -> str:
        before = self._word
        while self._word == before:
            self._word = "".join(self._rng.sample(LETTERS, 3))
        return self._request

    @property
    def _request(self) -> str:
        return REQUEST.format(self._word)


def shown(seed: int) -> Iterator[Sequence[ScriptTurn]]:
    """An endless iterator of conversations for the warm-up: an answer is the letters of the request in any order, a
    little more often in reverse."""
    rng = random.Random(seed)

    def answer(word: str) -> str:
        return word[::-1] if rng.random() < REVERSED else "".join(rng.sample(word, len(word)))

    while True:
        yield tuple(conversation(SimulatedUser(rng), answer))


def of_like_length(conversations: Iterator[Sequence[ScriptTurn]], count: int) -> Iterator[Sequence[ScriptTurn]]:
    """The same conversations in another order: each `count` of them, from the first on, need little padding."""
    rng = random.Random(count)
    while True:
        several = sorted(islice(conversations, count * LENGTHS), key=len)
        starts = list(range(0, len(several), count))
        rng.shuffle(starts)
        for start in starts:
            yield from several[start : start + count]


def conversation(user: SimulatedUser, answer: Callable[[str], str]) -> Iterator[ScriptTurn]:
    message: str | None = user.opening()
    while message is not None:
        reply = OK if message in CLOSINGS else answer(message.split()[-1])
        yield ScriptTurn("user", message)
        yield ScriptTurn("assistant", reply)
        message = user.react(reply).message


class UserConversation:
    """One session of a user, as the service sees it."""

    def __init__(self, client: "AsyncOpenAI") -> None:
        self.id = secrets.token_hex(16)
        self._client = client
        self._messages: list[ChatCompletionMessageParam] = []

    async def say(self, message: str) -> str:
        """Returns the model's reply."""
        if not self._messages:
            body = {"session": True, "trajectory_uid": self.id}
            opened = await self._client.post("/init_trajectory", body=body, cast_to=dict)
            self._client = self._client.with_options(base_url=opened["base_url"], api_key=opened["api_key"])
        self._messages.append({"role": "user", "content": message})
        answer = await self._client.chat.completions.create(
            model="demo", messages=self._messages, temperature=1.0, max_tokens=LONGEST_REPLY
        )
        reply = answer.choices[0].message.content or ""
        self._messages.append({"role": "assistant", "content": reply})
        return reply

    async def press_thumb(self, *, up: bool) -> None:
        """About the last reply."""
        body = {"value": 1.0 if up else -1.0, "step_index": len(self._messages) // 2 - 1, "source": "thumb"}
        await self._client.post("/feedback", body=body, cast_to=object)


class LiveService:
    def __init__(
        self, client: "AsyncOpenAI", orders: Orders, write: Callable[[UserTurn], None], thinking: float = THINKING
    ) -> None:
        self._client = client
        self._rng = random.Random(orders.seed)
        self._write = write
        self._thinking = thinking
        self._places = orders.concurrency
        self._is_open = False
        self._talking: list[asyncio.Task[None]] = []

    async def do(self, order: str) -> float:
        match order:
            case "talk":
                self._is_open = True
                self._talking = [asyncio.create_task(self._fill_place()) for _ in range(self._places)]
            case "stop":
                await self.stop()
        return 0.0

    async def stop(self) -> None:
        """No more users come; those who are here finish."""
        self._is_open = False
        await asyncio.gather(*self._talking)
        self._talking = []

    async def _fill_place(self) -> None:
        while self._is_open:
            await self.serve(SimulatedUser(random.Random(self._rng.random())))

    async def serve(self, user: SimulatedUser) -> None:
        """One session. A user whose call fails leaves."""
        conversation = UserConversation(self._client)
        message: str | None = user.opening()
        while message is not None:
            await asyncio.sleep(self._rng.expovariate(1 / self._thinking) if self._thinking else 0.0)
            try:
                reaction = user.react(await conversation.say(message))
                if reaction.thumb is not None:
                    await conversation.press_thumb(up=reaction.thumb)
            except Exception as failure:  # noqa: BLE001 - every cause is counted
                self._write(UserTurn(at=time.time(), session=conversation.id, failure=failure_text(failure)))
                return
            is_thumb = reaction.thumb is not None
            self._write(UserTurn(at=time.time(), session=conversation.id, accepted=reaction.accepted, thumb=is_thumb))
            message = reaction.message


def failure_text(failure: Exception) -> str:
    """The cause of a failed call, short and without ids, so that equal causes are counted together."""
    status = getattr(failure, "status_code", None)
    code = getattr(failure, "code", None)
    return " ".join(str(part) for part in (type(failure).__name__, status, code) if part is not None)


if __name__ == "__main__":
    logs.setup(json=False)
    told = Orders.from_json(sys.argv[1])
    with Path(told.turns).open("w") as turns_file:
        asyncio.run(follow(told, lambda url: LiveService(sdk_client(url), told, partial(write_turn, turns_file))))
