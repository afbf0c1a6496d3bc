"""The client for agents: a trajectory is a `with` block. Standard library only.

    run = stepwell.connect("http://127.0.0.1:8100")
    with run.trajectory(prompt_uid="task-7", group_size=4) as t:
        agent = OpenAI(base_url=t.base_url, api_key=t.api_key)
        ...
        t.reward = 1.0

Leaving the block completes the trajectory; an exception aborts it and is raised further. `async with` works too: its
few calls run in threads. While a gateway restarts, the calls at both ends of the block wait for it.
"""

import asyncio
import json
import ssl
import time
import urllib.parse
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Literal, Self
from uuid import uuid4

from stepwell.common.http import request
from stepwell.errors import WEIGHTS, BadRequest, GatewayUnreachable, NotReady, StepwellError, from_answer

TIMEOUT = 90.0
"""Seconds for one call. Longer than the gateway's own timeouts, so that its error text arrives."""
POLL = 0.2
WEIGHTS_PATIENCE = 8.0
"""Seconds that `connect` waits while only weights are missing: somebody must act, and is told so."""
UNTRUSTED = "; if the CA of its certificate is your own, set SSL_CERT_FILE to a file with it"
PROXY_ERRORS = (502, 503, 504)
"""The statuses by which a proxy tells that the gateway behind it does not answer."""


def connect(url: str, *, key: str | None = None, timeout: float = 30.0) -> "Run":
    """Connect to the gateway at `url`. Waits up to `timeout` seconds until it is ready; NotReady says what is missing.

    A trajectory's begin and end wait as long for a gateway that does not answer. `key` is the gateway's control key, if
    it has one. The agent gets another key, which is valid for its trajectory.
    """
    run = Run(url, key, patience=timeout)
    began = time.monotonic()
    while (why := run.why_not_ready()) is not None:
        patience = min(timeout, WEIGHTS_PATIENCE) if why.startswith(f"{WEIGHTS}: ") else timeout
        if time.monotonic() > began + patience:
            raise NotReady(f"the gateway at {run.url} is not ready after {patience:g} s: {why}")
        time.sleep(POLL)
    return run


class Run:
    """A connection to a gateway."""

    def __init__(self, url: str, key: str | None = None, *, patience: float = 30.0) -> None:
        """`patience` is how many seconds a trajectory's begin and end wait for a gateway that does not answer."""
        self.url = gateway_address(url)
        self._key = key
        self._patience = patience

    def why_not_ready(self) -> str | None:
        try:
            _call("GET", f"{self.url}/ready", None, self._key)
        except StepwellError as failure:
            return str(failure)
        return None

    def trajectory(
        self,
        *,
        prompt_uid: str | None = None,
        channel: str | None = None,
        group_size: int | None = None,
        metadata: Mapping[str, Any] | None = None,
    ) -> "TrajectoryContext":
        """One rollout. Rollouts with one prompt_uid form a group, which is trained when group_size are complete."""
        wanted = {"prompt_uid": prompt_uid, "channel": channel, "group_size": group_size, "metadata": metadata}
        return TrajectoryContext(self.url, self._key, _given(wanted), self._patience)

    def feedback(
        self,
        trajectory_uid: str,
        prompt_uid: str,
        value: float | None = None,
        *,
        thumb: Literal["up", "down"] | None = None,
        rating: float | None = None,
        scale: tuple[float, float] | None = None,
        step_index: int | Literal["last"] | None = None,
        source: str | None = None,
        note: str | None = None,
    ) -> str:
        """Score a rollout, or one of its steps, now or long after its end: a rating, an edit, a sale.

        A value is the reward; a thumb counts 1 or -1; a rating is mapped from its scale (1 to 5) to -1 … 1. Without a
        step_index, a value is for the whole rollout, a thumb or a rating for its last step.

        Returns "counted" if the reward is trained or stored in the archive, "late" if it is too late for both.
        """
        said = {"value": value, "thumb": thumb, "rating": rating, "scale": scale, "step_index": step_index}
        given = _given({**said, "source": source, "note": note})
        url = f"{self.url}/{_quoted(trajectory_uid)}/{_quoted(prompt_uid)}/v1/feedback"
        return str(_call("POST", url, given, self._key)["status"])


class TrajectoryContext:
    """One rollout; its fields are valid inside the `with` block."""

    base_url: str
    """The agent's OpenAI base_url."""
    api_key: str
    trajectory_uid: str
    prompt_uid: str
    reward: float | None = None
    """Set it before the end of the block. None leaves the rollout unscored, which is not the same as 0."""
    status: str = "open"
    """The state after the block: completed, aborted, empty (there was no call) or late (the pool had closed it)."""

    def __init__(self, url: str, key: str | None, wanted: Mapping[str, Any], patience: float) -> None:
        self._url = url
        self._key = key
        self._wanted = wanted
        self._patience = patience

    def __enter__(self) -> Self:
        names = {"trajectory_uid": uuid4().hex, "prompt_uid": uuid4().hex}  # so a repeated call opens the same one
        opened = self._post(f"{self._url}/init_trajectory", {**names, **self._wanted})
        self.base_url, self.api_key = opened["base_url"], opened["api_key"]
        self.trajectory_uid, self.prompt_uid = opened["trajectory_uid"], opened["prompt_uid"]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self._end("complete", {"reward": self.reward})
            return
        try:
            self._end("abort", {"reason": repr(error)[:500], "exception": type(error).__name__[:100]})
        except StepwellError as failure:
            error.add_note(f"the trajectory could not be aborted either: {failure}")

    async def __aenter__(self) -> Self:
        return await asyncio.to_thread(self.__enter__)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await asyncio.to_thread(self.__exit__, kind, error, trace)

    def _end(self, how: str, body: Mapping[str, Any]) -> None:
        self.status = self._post(f"{self.base_url}/{how}_trajectory", body)["status"]

    def _post(self, url: str, body: Mapping[str, Any]) -> dict[str, Any]:
        deadline = time.monotonic() + self._patience
        while True:
            try:
                return _call("POST", url, body, self._key)
            except NoAnswer:
                if time.monotonic() > deadline:
                    raise
            time.sleep(POLL)


def gateway_address(url: str) -> str:
    """The gateway's address, without the /v1 of a base_url. BadRequest if it is no address."""
    if not url.startswith(("http://", "https://")):
        raise BadRequest(f"{url!r} is not an address of a gateway; write http://host:port")
    return url.rstrip("/").removesuffix("/v1")


class NoAnswer(GatewayUnreachable):
    """Nothing answers at the gateway's address, or a proxy says so: the gateway may be restarting."""


def _given(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}


def _quoted(uid: str) -> str:
    return urllib.parse.quote(uid, safe=":@")


def _call(method: str, url: str, body: Mapping[str, Any] | None, key: str | None) -> dict[str, Any]:
    try:
        data = None if body is None else json.dumps(body, allow_nan=False).encode()
    except (TypeError, ValueError) as failure:
        raise BadRequest(f"{body} cannot be sent: {failure}") from None
    try:
        answer = request(method, url, data, key=key, timeout=TIMEOUT, by_proxy=True)
        if answer.status < 300:
            return dict(json.loads(answer.body))
    except (OSError, ValueError) as failure:
        why = UNTRUSTED if isinstance(getattr(failure, "reason", None), ssl.SSLCertVerificationError) else ""
        raise NoAnswer(f"no gateway answers at {url}: {failure}{why}") from None
    refusal = from_answer(url, answer.status, answer.body)
    is_of_proxy = isinstance(refusal, GatewayUnreachable) and answer.status in PROXY_ERRORS
    raise NoAnswer(str(refusal)) if is_of_proxy else refusal
