"""An engine as a weight sync drives it: vLLM's control routes, by plain blocking calls.

What always holds: no call is made twice, for none of them may be repeated blindly; whatever goes wrong is SyncFailed,
and names the engine, the call and what it answered. The key is in no text.
"""

import json
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPException
from typing import Any, TypeVar

from stepwell.errors import SyncFailed
from stepwell.steps.step import JsonObject

T = TypeVar("T")

TEXT_KEPT = 300
HINTS = {
    401: "; is engine_key the one that vLLM was started with?",
    404: "; vLLM has its control routes only if it was started with VLLM_SERVER_DEV_MODE=1",
}


class VllmControl:
    def __init__(self, url: str, *, key: str | None = None, timeout: float = 60.0) -> None:
        self.url = url.rstrip("/")
        self._key = key
        self._timeout = timeout

    def pause(self) -> None:
        """Calls under way are held where they are, and what was computed for them is forgotten."""
        self.post("/pause?mode=keep")

    def resume(self) -> None:
        self.post("/resume")

    def set_version(self, version: int) -> None:
        self.post("/update_weight_version", {"new_version": str(version)})

    def version(self) -> str:
        return str(self._ask("GET", "/weight_info", None).get("weight_version"))

    def forget_prefixes(self) -> None:
        """What the old weights computed must not be read by the new ones."""
        if self.post("/reset_prefix_cache").get("success") is not True:
            raise SyncFailed(f"{self.url} did not empty its prefix cache, which holds what the old weights computed")

    def logprobs(self, ids: Sequence[int]) -> list[float]:
        """Of each token but the first."""
        wanted: JsonObject = {"prompt": list(ids), "max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 0}
        answer = self.post("/v1/completions", wanted)
        try:
            told: Any = answer["choices"]
            pairs = zip(ids[1:], told[0]["prompt_logprobs"][1:], strict=True)
            return [float(entry[str(token)]["logprob"]) for token, entry in pairs]
        except (KeyError, IndexError, TypeError, ValueError):
            raise SyncFailed(f"{self.url} did not tell the log-probabilities of the probe: {_shown(answer)}") from None

    def post(self, path: str, body: JsonObject | None = None) -> JsonObject:
        return self._ask("POST", path, body)

    def _ask(self, method: str, path: str, body: JsonObject | None) -> JsonObject:
        content = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {self._key}"} if self._key else {})
        request = urllib.request.Request(f"{self.url}{path}", content, headers, method=method)
        what = f"{method} {self.url}{path}"
        try:
            with urllib.request.urlopen(request, timeout=self._timeout) as reply:
                answer = json.loads(reply.read() or b"{}")
        except urllib.error.HTTPError as refused:
            text = refused.read().decode(errors="replace")[:TEXT_KEPT]
            raise SyncFailed(f"{what} answered {refused.code}: {text}{HINTS.get(refused.code, '')}") from None
        except TimeoutError:
            raise SyncFailed(f"{what} did not answer within {self._timeout:g} s") from None
        except (OSError, HTTPException, ValueError) as failure:
            raise SyncFailed(f"{what}: {failure}") from None
        return answer if isinstance(answer, dict) else {}


def on_each(engines: Sequence[VllmControl], call: Callable[[VllmControl], T]) -> list[T]:
    """Of all engines at once; returns when all have answered, and raises what the first of them did that failed."""
    with ThreadPoolExecutor(len(engines)) as threads:
        return [future.result() for future in [threads.submit(call, engine) for engine in engines]]


def _shown(answer: JsonObject) -> str:
    return json.dumps(answer)[:TEXT_KEPT]
