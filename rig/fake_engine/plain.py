"""What a plain OpenAI server knows, and what of vLLM's it does not."""

from rig.fake_engine.asking import Json, RefusedError

SHARED_FIELDS = (
    *("model", "frequency_penalty", "presence_penalty", "logit_bias", "logprobs", "max_tokens", "n", "seed", "stop"),
    *("stream", "stream_options", "temperature", "top_p", "user"),
)
FIELDS = {
    "/v1/completions": {*SHARED_FIELDS, "prompt", "best_of", "echo", "suffix"},
    "/v1/chat/completions": {
        *SHARED_FIELDS,
        *("messages", "audio", "function_call", "functions", "max_completion_tokens", "metadata", "modalities"),
        *("parallel_tool_calls", "prediction", "prompt_cache_key", "reasoning_effort", "response_format"),
        *("safety_identifier", "service_tier", "store", "tool_choice", "tools", "top_logprobs", "verbosity"),
        "web_search_options",
    },
}
VLLMS_OWN = {
    *("token_ids", "prompt_token_ids", "prompt_text", "prompt_logprobs", "stop_reason", "routed_experts"),
    *("kv_transfer_params", "ec_transfer_params", "metrics", "max_model_len", "root", "parent", "permission"),
}
"""Fields of answers and of their choices."""


def refuse_unknown_fields(path: str, body: Json) -> None:
    for name in body:
        if name not in FIELDS[path]:
            raise RefusedError(400, "invalid_request_error", f"Unrecognized request argument supplied: {name}", name)


def as_plain(payload: Json) -> Json:
    """An answer or a chunk, without what only vLLM says."""
    plain = {name: value for name, value in payload.items() if name not in VLLMS_OWN}
    if "choices" in plain:
        plain["choices"] = [as_plain(choice) for choice in plain["choices"]]
    return plain
