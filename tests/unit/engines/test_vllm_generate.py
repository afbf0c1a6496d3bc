import json
from typing import Any

import pytest

from stepwell.engines.vllm_generate import read_generated


@pytest.mark.parametrize(("named", "model"), [({}, "served"), ({"model": None}, "served"), ({"model": "lora"}, "lora")])
def test_a_generation_is_of_the_model_it_names_or_of_the_one_that_is_served(named: dict[str, Any], model: str) -> None:
    reply = {**named, "choices": [{"token_ids": [7], "finish_reason": "stop"}]}
    assert read_generated(json.dumps(reply).encode(), [1], "served").sampled.model == model
