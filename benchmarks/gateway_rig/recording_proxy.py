"""The yardstick: the least that a recording proxy can be in Python without writing HTTP oneself.

It asks the engine for token ids and log-probabilities, keeps them as arrays in memory, and gives the client what the
client asked for. No route but one, no error handling, no pool, one engine: what a gateway has beyond this, it pays for.
"""

import argparse
from collections import deque
from typing import Any

import aiohttp
import numpy as np
import orjson
import uvicorn

KEPT = 20_000
JSON, EVENTS = [(b"content-type", b"application/json")], [(b"content-type", b"text/event-stream; charset=utf-8")]


class RecordingProxy:
    def __init__(self, engine: str) -> None:
        self.url = f"{engine}/v1/chat/completions"
        self.records: deque[tuple[Any, ...]] = deque(maxlen=KEPT)
        self.counted = {"calls": 0, "tokens": 0}

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            connector = aiohttp.TCPConnector(limit=0)
            self.session = aiohttp.ClientSession(connector=connector, headers={"Content-Type": "application/json"})
            await receive()
            await send({"type": "lifespan.startup.complete"})
            await receive()
            await self.session.close()
            await send({"type": "lifespan.shutdown.complete"})
        elif scope["method"] == "GET":
            await answer(send, orjson.dumps(self.counted))
        else:
            await self.chat(orjson.loads(await read(receive)), send)

    async def chat(self, request: dict[str, Any], send: Any) -> None:
        request["logprobs"] = request["return_token_ids"] = True
        if request.get("stream"):
            request["stream_options"] = {"include_usage": True}
        async with self.session.post(self.url, data=orjson.dumps(request)) as reply:
            if request.get("stream"):
                await self.stream(reply, send)
            else:
                await answer(send, self.whole(await reply.read()))

    def whole(self, raw: bytes) -> bytes:
        reply = orjson.loads(raw)
        choice = reply["choices"][0]
        values = [entry["logprob"] for entry in choice["logprobs"]["content"]]
        self.record(reply.pop("prompt_token_ids"), choice.pop("token_ids"), values)
        choice["logprobs"] = None
        return orjson.dumps(reply)

    async def stream(self, reply: aiohttp.ClientResponse, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": EVENTS})
        prompt_ids: list[int] = []
        ids: list[int] = []
        values: list[float] = []
        rest = b""
        async for piece in reply.content.iter_any():
            *events, rest = (rest + piece).split(b"\n\n")
            out = []
            for event in events:
                if event == b"data: [DONE]":
                    out.append(event)
                    continue
                chunk = orjson.loads(event[6:])
                if "prompt_token_ids" in chunk:
                    prompt_ids = chunk.pop("prompt_token_ids")
                for choice in chunk["choices"]:
                    ids += choice.pop("token_ids", ())
                    if choice["logprobs"]:
                        values += [entry["logprob"] for entry in choice["logprobs"]["content"]]
                        choice["logprobs"] = None
                if chunk["choices"]:
                    out.append(b"data: " + orjson.dumps(chunk))
            if out:
                body = b"\n\n".join(out) + b"\n\n"
                await send({"type": "http.response.body", "body": body, "more_body": True})
        self.record(prompt_ids, ids, values)
        await send({"type": "http.response.body", "body": b""})

    def record(self, prompt_ids: list[int], ids: list[int], logprobs: list[float]) -> None:
        self.records.append((np.array(prompt_ids, np.int32), np.array(ids, np.int32), np.array(logprobs, np.float32)))
        self.counted["calls"] += 1
        self.counted["tokens"] += len(ids)


async def read(receive: Any) -> bytes:
    message = await receive()
    body: bytes = message["body"]
    while message["more_body"]:
        message = await receive()
        body += message["body"]
    return body


async def answer(send: Any, body: bytes) -> None:
    headers = [*JSON, (b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--engine", required=True)
    given = parser.parse_args()
    uvicorn.run(RecordingProxy(given.engine), port=given.port, log_level="warning", access_log=False)


if __name__ == "__main__":
    main()
