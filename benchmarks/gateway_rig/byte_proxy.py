"""A plain proxy with FastAPI and aiohttp: passes bytes both ways, records nothing."""

import argparse
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp
import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.responses import StreamingResponse


def create_app(engine: str) -> FastAPI:
    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        headers = {"Content-Type": "application/json"}
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), headers=headers) as session:
            app.state.session = session
            yield

    app = FastAPI(lifespan=lifespan)

    @app.get("/health")
    async def health() -> dict[str, str]:
        return {}

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        reply = await app.state.session.post(f"{engine}/v1/chat/completions", data=await request.body())
        if reply.content_type == "text/event-stream":
            return StreamingResponse(reply.content.iter_any(), media_type="text/event-stream")
        return Response(await reply.read(), media_type="application/json")

    return app


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--engine", required=True)
    given = parser.parse_args()
    uvicorn.run(create_app(given.engine), port=given.port, log_level="warning", access_log=False)


if __name__ == "__main__":
    main()
