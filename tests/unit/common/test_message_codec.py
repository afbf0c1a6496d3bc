"""What travels over a link arrives as it was sent. A new type that cannot travel is noticed here, not in a pool."""

import inspect
import math
import struct
import subprocess
import sys
import typing
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import is_dataclass, replace
from enum import Enum
from importlib import import_module
from types import NoneType
from typing import Any, NamedTuple

import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from stepwell.pool.slices.producing import ChannelIfOpen

from rig.builders import make_step
from stepwell import errors
from stepwell.common.message_codec import (
    CLASS,
    ENUM,
    FAILURE,
    HOMES,
    SEPARATOR,
    TUPLE,
    MalformedMessage,
    pack_message,
    unpack_message,
)
from stepwell.common.message_format import FORMAT, MESSAGES, OWN_FORMS, Json, field_fits, field_names, fit
from stepwell.errors import IncompatibleMessage, StepwellError
from stepwell.pool.api.leasing import BatchRequest
from stepwell.pool.api.plan import GroupElsewhere
from stepwell.pool.api.producing import FlushNeeded, SubmitVerdict
from stepwell.pool.api.scoring import RewardScorer
from stepwell.pool.api.transport import ActorAway, ActorFailed
from stepwell.pool.client.link_messages import LinkAnswer, LinkCall, LinkState
from stepwell.pool.shard.operation import LongOperation, Operation
from stepwell.pool.shard.service import ShardService
from stepwell.steps.columns import Columns, PrefixLinks, pack, unpack
from stepwell.steps.step import Exactness, VersionSpan

STEP_METADATA = {"gt": 2**70, "scores": [math.inf, -0.0, 1, True, None], "half": "\ud800", "nested": {"null": "null"}}


def arrived(value: Any) -> Any:
    return unpack_message([bytes(part) for part in pack_message(value)])


def is_same(a: Any, b: Any) -> Any:
    """Equal in value and class, all the way down."""
    if type(a) is not type(b):
        return False
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(a, float):
        return (a != a and b != b) or struct.pack("d", a) == struct.pack("d", b)
    if isinstance(a, Mapping):
        return list(map(repr, a)) == list(map(repr, b)) and all(map(is_same, a.values(), b.values()))
    if isinstance(a, Columns):
        return is_same(unpack(a, copy=True), unpack(b, copy=True)) and is_same(a.bases, b.bases)
    if is_dataclass(a):
        return all(is_same(getattr(a, name), getattr(b, name)) for name in field_names(a.__class__))
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(is_same, a, b))
    return repr(a) == repr(b) if isinstance(a, Exception) else bool(a == b)


def public_calls() -> Iterator[Any]:
    for name, call in inspect.getmembers(ShardService, inspect.isfunction):
        if not name.startswith(("_", "run")):  # what they run is below
            yield call
    yield RewardScorer.compute_reward


def annotations() -> Iterator[Any]:
    """All types of arguments and answers."""
    for call in public_calls():
        hints = typing.get_type_hints(call, localns={"Json": Json})
        assert hints.keys() >= {name for name in inspect.signature(call).parameters if name != "self"} | {"return"}, (
            call
        )
        yield from (hint for hint in hints.values() if hint is not typing.NoReturn)
    for operation in operations():
        yield operation
        yield typing.get_type_hints(operation.run, localns={"Json": Json, "Shard": NoneType})["return"]


def operations() -> Iterator[type[Operation[Any] | LongOperation[Any]]]:
    for module in HOMES:
        import_module(module)
    for cls in MESSAGES.values():
        if issubclass(cls, Operation | LongOperation) and cls.__module__.startswith("stepwell."):
            yield cls


def classes_in(annotation: Any) -> Iterator[type]:
    if isinstance(annotation, type) and annotation.__module__.startswith("stepwell") and annotation is not Json:
        yield annotation
    for part in typing.get_args(annotation):
        yield from classes_in(part)


def has_fields(cls: type) -> bool:
    return not issubclass(cls, Enum | Exception)


def sent_classes() -> set[Any]:
    found: set[Any] = {LinkCall, LinkAnswer, LinkState}
    waiting = [cls for annotation in annotations() for cls in classes_in(annotation)]
    while waiting:
        cls = waiting.pop()
        if cls not in found:
            found.add(cls)
            if has_fields(cls):
                hints = typing.get_type_hints(cls, localns={"Json": Json})
                names = field_names(cls) if MESSAGES.get(cls.__name__) is cls else tuple(hints)
                waiting += [part for name in names for part in classes_in(hints[name])]
    return found


SIMPLE: dict[Any, Any] = {
    NoneType: None,
    str: "täxt",
    int: 2**63,
    float: math.nan,
    bool: True,
    Any: [{"a": (1,)}],
    object: {1, 2},
    Json: {"a": [None, 1.5, {"b": -(2**64)}]},
    Exception: GroupElsewhere("p"),
}


def example(annotation: Any) -> Any:
    if annotation in SIMPLE:
        return SIMPLE[annotation]
    if annotation is Columns:
        return pack([make_step(metadata=STEP_METADATA), make_step(version_spans=(VersionSpan(1, 0, 2),))])
    if typing.get_origin(annotation) is not None:
        return generic_example(typing.get_origin(annotation), typing.get_args(annotation))
    if issubclass(annotation, Enum):
        return [*annotation][-1]
    hints = typing.get_type_hints(annotation, localns={"Json": Json})
    return annotation(**{name: example(hints[name]) for name in field_names(annotation)})


def generic_example(origin: Any, args: tuple[Any, ...]) -> Any:
    if origin is np.ndarray:
        return np.arange(5).astype(typing.get_args(args[1])[0])
    if origin is tuple:
        return tuple(map(example, args)) if args[-1] is not Ellipsis else (example(args[0]),) * 2
    if origin is Counter:
        return Counter({example(args[0]): 3})
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return {example(args[0]): example(args[1])}
    if isinstance(origin, type) and issubclass(origin, Sequence):
        return [example(args[0])] * 2
    return args[0] if origin is typing.Literal else example(args[0])


def test_every_type_in_the_calls_of_shards_and_reward_workers_can_travel() -> None:
    assert len(sent_classes()) > 50
    for annotation in annotations():
        fit(annotation)
    for cls in sent_classes():
        assert MESSAGES[cls.__name__] is cls, cls
        assert cls.__module__ in HOMES, "a process that has not imported it finds it by this list"
        if has_fields(cls) and cls not in OWN_FORMS:
            field_fits(cls)


def test_a_type_that_is_not_registered_is_named() -> None:
    class Unregistered(NamedTuple):
        value: int

    with pytest.raises(TypeError, match="Unregistered.* cannot travel: give the class @message"):
        fit(list[Unregistered])
    with pytest.raises(TypeError, match="Unregistered.* cannot travel: give the class @message"):
        pack_message([Unregistered(1)])
    with pytest.raises(TypeError, match="arrays of object cannot travel"):
        pack_message(np.array([{}], object))


@pytest.mark.parametrize("cls", sorted(sent_classes(), key=repr), ids=repr)
def test_an_example_of_each_class_arrives_as_it_was_sent(cls: type) -> None:
    value = GroupElsewhere("p") if issubclass(cls, Exception) else example(cls)
    assert is_same(arrived(value), value)
    assert is_same(
        arrived(LinkCall("a", "m", [value, value], {"n": value})), LinkCall("a", "m", [value] * 2, {"n": value})
    )


def test_an_example_of_each_argument_and_answer_arrives_as_it_was_sent() -> None:
    for annotation in annotations():
        value = example(annotation)
        assert is_same(arrived(LinkAnswer([value])), LinkAnswer([value])), annotation


plain = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(st.characters())
    | st.binary()
    | st.sampled_from([*SubmitVerdict]),
    lambda parts: st.lists(parts) | st.lists(parts).map(tuple) | st.dictionaries(st.text() | st.integers(-9, 9), parts),
    max_leaves=12,
)


@settings(max_examples=60, deadline=None)
@given(plain)
def test_plain_values_arrive_exactly(value: Any) -> None:
    assert is_same(arrived(value), value)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters()),
    lambda parts: st.lists(parts, max_size=3) | st.dictionaries(st.text(), parts, max_size=3),
    max_leaves=6,
)


@settings(max_examples=40, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.dictionaries(st.text(), json_values, max_size=3), st.none() | st.text(), st.text(), st.integers(0, 2)
        ),
        max_size=4,
    )
)
def test_columns_arrive_exactly(told: list[Any]) -> None:
    steps = [
        make_step(metadata=metadata, quarantine=why, uid=uid, version_spans=(VersionSpan(2, 0, 1),) * spans)
        for metadata, why, uid, spans in told
    ]
    assert is_same(unpack(arrived(pack(steps)), copy=False), steps)


def test_arrays_are_read_only_views_of_what_was_received() -> None:
    columns = replace(
        pack([make_step()] * 2), bases=PrefixLinks(np.array([-1, 0], np.int32), np.array([0, 0], np.int32))
    )
    parts = [bytes(part) for part in pack_message(columns)]
    received: Columns = unpack_message(parts)
    assert not received.added.flags.writeable
    assert any(np.shares_memory(received.added, np.frombuffer(part, np.uint8)) for part in parts[1:])
    assert is_same(received.bases, columns.bases)
    grid = np.arange(6.0).reshape(2, 3).T
    assert is_same(arrived(grid), np.ascontiguousarray(grid))
    assert is_same(arrived(np.zeros((0, 3), np.float32)), np.zeros((0, 3), np.float32))
    assert is_same(arrived(np.float32(0.1)), np.float32(0.1))


def test_what_is_no_json_arrives_with_the_columns_all_the_same() -> None:
    (step,) = unpack(arrived(pack([make_step(metadata={"n": np.int64(3)}, uid="a\0b")])), copy=False)
    assert is_same((step.metadata, step.uid), ({"n": np.int64(3)}, "a\0b"))


def test_columns_that_do_not_have_the_dtype_of_the_table_keep_theirs() -> None:
    columns = replace(pack([make_step()] * 2), step_indexes_S=np.array([1, 2], np.int64))
    assert arrived(columns).step_indexes_S.dtype == np.int64


def test_failures_arrive_with_their_class_and_text_or_as_failures_of_the_actor() -> None:
    class Newer(GroupElsewhere):
        pass

    for name, error in vars(errors).items():
        if isinstance(error, type) and issubclass(error, StepwellError):
            assert is_same(arrived(error(f"{name} happened")), error(f"{name} happened"))
    assert is_same(arrived(FlushNeeded("t", "gateway")), FlushNeeded("t", "gateway"))
    assert is_same(arrived(ActorAway("why")), ActorAway("why"))
    failed = arrived(ActorFailed("KeyError: 1", "in line 3"))
    assert (failed.reason, failed.traceback) == ("KeyError: 1", "in line 3")
    assert is_same(arrived(Newer("p")), GroupElsewhere("p"))
    assert is_same(arrived([KeyError("x")]), [ActorFailed("KeyError: 'x'")])


def sent_by_another(name: str, sent_format: int, *fields: tuple[str, Any]) -> list[bytes]:
    names = SEPARATOR.join((name, str(sent_format), *(field for field, _ in fields)))
    return [msgpack.packb([msgpack.ExtType(CLASS, names.encode()), *(value for _, value in fields)])]


def test_fields_of_other_releases_are_left_out_and_missing_ones_get_their_default() -> None:
    sent = sent_by_another("ChannelIfOpen", FORMAT, ("new", 1), ("prompt_uid", "p"), ("trajectory_uid", "t"))
    assert unpack_message(sent) == ChannelIfOpen("t", "p")
    with pytest.raises(IncompatibleMessage, match="ChannelIfOpen came without trajectory_uid"):
        unpack_message(sent_by_another("ChannelIfOpen", FORMAT, ("prompt_uid", "p")))
    with pytest.raises(IncompatibleMessage, match="cannot read ChannelIfOpen of another one"):
        unpack_message(sent_by_another("ChannelIfOpen", FORMAT + 1, ("prompt_uid", "p")))
    with pytest.raises(IncompatibleMessage, match="cannot read Popen of another one"):
        unpack_message(sent_by_another("Popen", FORMAT, ("args", "touch x")))
    with pytest.raises(IncompatibleMessage, match="knows no Exactness 'better'"):
        unpack_message([msgpack.packb(msgpack.ExtType(ENUM, b"Exactness\0better"))])


READING = """
import sys
from stepwell.common.message_codec import unpack_message
assert not [name for name in sys.modules if name.startswith("stepwell.pool")]
print(unpack_message([sys.stdin.buffer.read()]))
"""


def test_a_process_finds_a_class_that_it_has_not_imported_and_imports_nothing_for_an_unknown_one() -> None:
    def read(packed: bytes) -> "subprocess.CompletedProcess[bytes]":
        return subprocess.run([sys.executable, "-c", READING], input=packed, capture_output=True, check=False)

    (known,) = pack_message([ChannelIfOpen("t", "p"), GroupElsewhere("p")])
    found = read(bytes(known))
    assert found.stdout.startswith(b"[ChannelIfOpen(trajectory_uid='t', prompt_uid='p'"), found.stderr
    (unknown,) = sent_by_another("http.server.HTTPServer", FORMAT, ("a", 1))
    assert b"IncompatibleMessage: this Stepwell cannot read http.server.HTTPServer" in read(unknown).stderr


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("ChannelIfOpen", {"trajectory_uid": 1, "prompt_uid": "p"}),
        ("ChannelIfOpen", {"trajectory_uid": None, "prompt_uid": "p"}),
        ("Registration", {"trajectory_uid": "t", "prompt_uid": "p", "outcome": {"value": 1.0}}),
        ("ReadySummary", {"revision": 1, "ages": [1.0, "x"], "nothing_after": 0.0}),
        ("BatchRequest", {"count": 1, "channel": "c", "unit": "groups"}),
        ("RecordedTurn", {"uid": "u", "tokens": [1, 2], "finish_reason": None, "lineage": {}}),
        ("Layout", {"revision": 1, "shards": "2"}),
    ],
)
def test_no_constructor_is_called_with_what_does_not_fit(name: str, fields: dict[str, Any]) -> None:
    assert MESSAGES.keys() >= {name}
    with pytest.raises(IncompatibleMessage, match=rf"{name}\.\w+ cannot be what another process sent"):
        unpack_message(sent_by_another(name, FORMAT, *fields.items()))


@pytest.mark.parametrize(
    "changed",
    [
        {"short": b""},
        {"count": 3},
        {"lists": b'{"metadata": [1, 2]}'},
        {"texts": "a"},
        {"tokens": np.zeros(3, np.int32)},
        {"tokens": np.zeros(8, np.float32)},
        {"mask": [True, True]},
        {"spans": bytes(24)},
        {"count": -1},
        {"count": 2**40},
        {"text_names": "uids*"},
        {"bases": PrefixLinks(np.array([5, 9], np.int32), np.array([0, 0], np.int32))},
        {"layout": "prompt_lengths_S:|O"},
    ],
    ids=str,
)
def test_columns_that_do_not_fit_together_are_refused(changed: dict[str, Any]) -> None:
    values = {**OWN_FORMS[Columns].values(pack([make_step()] * 2)), **changed}
    mark = msgpack.ExtType(CLASS, f"Columns{SEPARATOR}{FORMAT}".encode())
    arrays: list[bytes] = []
    parts = pack_message(values)
    packed = msgpack.packb([mark], use_bin_type=True)[:0] + b"\x92" + msgpack.packb(mark) + bytes(parts[0])
    arrays = [bytes(part) for part in parts[1:]]
    with pytest.raises(IncompatibleMessage, match="Columns cannot be what another process sent"):
        unpack_message([packed, *arrays])


MARK = msgpack.ExtType(TUPLE, b"")


@pytest.mark.parametrize(
    "packed",
    [
        b"",
        b"\xc1",
        msgpack.packb([1, 2])[:-1],
        msgpack.packb(1) + b"\x01",
        b"\xdd\xff\xff\xff\xff" * 500,
        b"\xdd\x00\x0f\x00\x00" * 900 + bytes(2**20),
        b"\x91" * 5000 + b"\xc0",
        b"\x81\xa1x" * 1500 + b"\xc0",
        b"\xdf\xff\xff\xff\xff",
        msgpack.packb({"a": MARK}),
        msgpack.packb(["a", MARK]),
        msgpack.packb(msgpack.ExtType(99, b"")),
        msgpack.packb(msgpack.ExtType(8, struct.pack("<BIQ", 3, 0, 5))),
        msgpack.packb(msgpack.ExtType(8, struct.pack("<BIQ", 99, 0, 5))),
        msgpack.packb(msgpack.ExtType(8, b"")),
        msgpack.packb([msgpack.ExtType(1, b"\x00")]),
        msgpack.packb([msgpack.ExtType(CLASS, b"x" * 2**16)]),
        msgpack.packb([msgpack.ExtType(CLASS, b"ChannelIfOpen\0001\0trajectory_uid\0prompt_uid"), "t"]),
        msgpack.packb([msgpack.ExtType(4, b""), [[1]]]),
        b"\x81\x92" + msgpack.packb(MARK) + b"\x01\x02",
        msgpack.packb({msgpack.ExtType(10, (2**61 - 1 << 61).to_bytes(20, "little")): 1}),
    ],
    ids=lambda packed: packed[:12].hex(),
)
def test_bytes_that_are_no_message_are_refused(packed: bytes) -> None:
    with pytest.raises(MalformedMessage):
        unpack_message([packed])


def test_an_error_is_made_of_texts_and_of_registered_classes_only() -> None:
    for name, args in (
        (b"ActorAway", [1]),
        (b"ActorFailed", []),
        (b"SystemExit", ["x"]),
        (b"ChannelIfOpen", ["t", "p"]),
    ):
        with pytest.raises(IncompatibleMessage):
            unpack_message([msgpack.packb([msgpack.ExtType(FAILURE, name), *args])])


def test_an_enum_or_a_number_fits_where_its_base_is_expected() -> None:
    request = BatchRequest(count=np.int64(3), channel=Exactness.ENGINE, history=1)  # type: ignore[arg-type]
    assert is_same(arrived(request), request)
