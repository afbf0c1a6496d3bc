"""A chat service whose users train its model.

POST /chat answers a user, and POST /thumb says what the user thought of the last answer. The service knows nothing of
groups, and nobody says when a chat is over.
"""

import os
from dataclasses import dataclass, field
from typing import Any, Literal

import uvicorn
from fastapi import FastAPI, HTTPException
from openai import OpenAI
from pydantic import BaseModel

import stepwell

GATEWAY = os.environ["STEPWELL_URL"]


@dataclass
class Chat:
    messages: list[Any] = field(default_factory=list)
    trajectory: str = ""
    """Where the last answer was recorded: trajectory_uid/prompt_uid."""


class Said(BaseModel):
    chat: str
    text: str


class Thumb(BaseModel):
    chat: str
    thumb: Literal["up", "down"]


app = FastAPI()
model = OpenAI(base_url=f"{GATEWAY}/v1", api_key=os.environ["SESSION_KEY"])
operator = stepwell.connect(GATEWAY, key=os.environ["STEPWELL_KEY"])
chats: dict[str, Chat] = {}


@app.post("/chat")
def answer(said: Said) -> dict[str, str]:
    chat = chats.setdefault(said.chat, Chat())
    chat.messages.append({"role": "user", "content": said.text})
    answered = model.chat.completions.with_raw_response.create(
        model="default", messages=chat.messages, max_tokens=512, extra_headers={"x-session-id": said.chat}
    )
    chat.trajectory = answered.headers.get("x-stepwell-trajectory", "")
    text = answered.parse().choices[0].message.content or ""
    chat.messages.append({"role": "assistant", "content": text})
    return {"text": text}


@app.post("/thumb")
def rate(given: Thumb) -> dict[str, str]:
    """The users' browsers call it; only the service has a key that gives rewards."""
    chat = chats.get(given.chat)
    if chat is None or not chat.trajectory:
        raise HTTPException(404, "nothing was recorded of this chat")
    trajectory_uid, _, prompt_uid = chat.trajectory.partition("/")
    return {"feedback": operator.feedback(trajectory_uid, prompt_uid, thumb=given.thumb, source="thumb")}


if __name__ == "__main__":
    uvicorn.run(app, port=int(os.environ.get("PORT", "8300")), log_level="warning")
