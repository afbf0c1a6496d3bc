"""How an answer's JSON becomes bytes, and the faults that are a matter of bytes."""

import orjson

from rig.fake_engine.asking import Json
from rig.fake_engine.faults import Faults

NO_UTF8 = b"\xff\xc3("


def encode_payload(payload: Json, faults: Faults) -> bytes:
    if faults.malformed == "no_choices":
        payload = {name: value for name, value in payload.items() if name != "choices"}
    encoded = orjson.dumps(payload)
    if faults.invalid_utf8:
        encoded = encoded.replace(b'"content":"', b'"content":"' + NO_UTF8)
    return encoded[: len(encoded) // 2] if faults.malformed == "not_json" else encoded


def event(payload: Json, faults: Faults) -> bytes:
    return b"data: " + encode_payload(payload, faults) + b"\n\n"


def awkward_pieces(data: bytes) -> list[bytes]:
    """The same bytes, cut within the first "data: ", within every character of several bytes, and within line ends."""
    within = [k for k in range(1, len(data)) if data[k] & 0xC0 == 0x80 or data[k - 1 : k + 1] == b"\n\n"]
    cuts = sorted({3, *within} & set(range(1, len(data))))
    return [data[start:end] for start, end in zip([0, *cuts], [*cuts, len(data)], strict=True)]
