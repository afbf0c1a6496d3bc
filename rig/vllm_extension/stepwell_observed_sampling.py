"""vLLM samples what a script says, and notes what it was asked and sampled; imported inside vLLM's environment only.

- A request with `vllm_xargs: {"script": [ids]}` and temperature 0 gets these tokens: each is made the likeliest by a
  little, so that its log-probability still depends on the whole prompt.
- The scheduler, through which all requests and tokens of the engine's core pass, writes each finished request as a line
  of JSON into the file that STEPWELL_SAMPLING_LOG names.
"""

import json
import os
from collections.abc import Callable
from typing import Any

from stepwell_take_time import TakeTime  # type: ignore[import-not-found]
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor

AHEAD = 1.0
"""By how much the scripted token leads the likeliest one, in logits."""


class ScriptedSampling(AdapterLogitsProcessor):  # type: ignore[misc]
    def is_argmax_invariant(self) -> bool:
        return False

    def new_req_logits_processor(self, params: Any) -> Callable[[list[int], Any], Any] | None:
        script = (params.extra_args or {}).get("script")
        if not script:
            return None

        def lead(output_ids: list[int], logits: Any) -> Any:
            if len(output_ids) < len(script):
                logits[script[len(output_ids)]] = logits.max() + AHEAD
            return logits

        return lead


class SamplingLog:
    def __init__(self, path: str) -> None:
        self._path = path
        self._running: dict[str, dict[str, Any]] = {}

    def note_request(self, request: Any) -> None:
        prompt = [int(token) for token in request.prompt_token_ids or ()]
        self._running[request.request_id] = {"prompt_ids": prompt, "response_ids": [], "logprobs": []}

    def note_output(self, output: Any) -> None:
        noted = self._running.get(output.request_id)
        if noted is None:
            return
        noted["response_ids"] += map(int, output.new_token_ids)
        if output.new_logprobs is not None:
            noted["logprobs"] += (float(row[0]) for row in output.new_logprobs.logprobs)
        if output.finish_reason is not None:
            with open(self._path, "a") as file:
                file.write(json.dumps(self._running.pop(output.request_id)) + "\n")


def _watch(log: SamplingLog) -> None:
    add_request, update_from_output = Scheduler.add_request, Scheduler.update_from_output

    def noted_request(self: Any, request: Any) -> Any:
        log.note_request(request)
        return add_request(self, request)

    def noted_output(self: Any, *args: Any, **named: Any) -> Any:
        of_clients = update_from_output(self, *args, **named)
        for outputs in of_clients.values():
            for output in outputs.outputs:
                log.note_output(output)
        return of_clients

    Scheduler.add_request, Scheduler.update_from_output = noted_request, noted_output


class ObservedSampling(TakeTime):  # type: ignore[misc]
    """The worker extension; importing it is enough."""


if path := os.environ.get("STEPWELL_SAMPLING_LOG"):
    _watch(SamplingLog(path))
