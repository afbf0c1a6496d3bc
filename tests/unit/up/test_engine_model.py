"""What the engine reports of its model, and servers that are not engines."""

import pytest

from stepwell.errors import EngineUnavailable
from stepwell.up.engine_model import ServedModel, read_model, wait_for_model
from stepwell.up.http import JsonAnswer
from tests.rig.gateways import free_port


def test_optional_fields_of_the_model_may_be_missing() -> None:
    listed = JsonAnswer(200, {"data": [{"id": "m", "root": "/m", "max_model_len": 8}]})
    assert read_model("http://e", listed) == ServedModel(name="m", root="/m", window=8)
    assert read_model("http://e", JsonAnswer(200, {"data": [{"id": "m"}]})) == ServedModel(
        name="m", root=None, window=None
    )


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (JsonAnswer(401, {"error": "no"}), "requires a key: set STEPWELL_GATEWAY_ENGINE_KEY"),
        (JsonAnswer(404, "Not Found"), r"lists no models at /v1/models \(it answers 404\)"),
        (JsonAnswer(200, {"data": []}), "lists no models"),
    ],
)
def test_a_server_that_is_not_an_engine_is_refused_with_advice(answer: JsonAnswer, said: str) -> None:
    with pytest.raises(EngineUnavailable, match=said):
        read_model("http://e", answer)


def test_an_address_without_an_engine_is_given_up_with_what_to_do() -> None:
    address, told = f"http://127.0.0.1:{free_port()}", set[str]()
    with pytest.raises(
        EngineUnavailable, match=f"no engine answers at {address} after 0.6 s: Connection refused; start"
    ):
        wait_for_model(address, None, told.add, timeout=0.6)
    (why,) = told
    assert why.startswith(
        "Connection refused (tries for 0.6 s); if none runs, start one: VLLM_SERVER_DEV_MODE=1 vllm serve"
    )
