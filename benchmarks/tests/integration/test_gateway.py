"""The rig of the gateway's benchmarks, run for a moment: it measures what it says, and what it says is checked."""

from collections.abc import Iterator
from pathlib import Path

import aiohttp
import orjson
import pytest

from benchmarks.gateway_rig import canned
from benchmarks.gateway_rig.answers import check_answers
from benchmarks.gateway_rig.metrics import Histogram
from benchmarks.gateway_rig.ours import OurGateway, our_gateway
from benchmarks.gateway_rig.processes import LoadProcess, Server, module, serving
from benchmarks.gateway_rig.rounds import KINDS, Course
from benchmarks.gateway_rig.spoken import CHAT, SPOKEN
from benchmarks.gateway_rig.subjects import bare_subjects
from benchmarks.streams import Watched, crowd, hold_streams
from rig.fake_engine import FakeEngine
from rig.fake_engine.asking import Json
from rig.ray_cluster import RayCluster

ASKED = {"messages": [{"role": "user", "content": "hello"}], "model": canned.MODEL, "max_tokens": 4, "ignore_eos": True}
EXTRAS = {"logprobs": True, "return_token_ids": True}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("rig")


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[Server]:
    with serving(module("engine"), folder / "engine.log") as server:
        yield server


@pytest.fixture(scope="module")
def load() -> Iterator[LoadProcess]:
    with LoadProcess() as load:
        yield load


@pytest.fixture(scope="module")
def ours(engine: Server, folder: Path, ray_cluster: RayCluster) -> Iterator[OurGateway]:
    with ray_cluster.namespace() as name, our_gateway(engine, folder, ray_cluster.address, name) as gateway:
        yield gateway


def shape(value: object) -> object:
    """A JSON value's keys, without its contents; a list is as its first entry."""
    if isinstance(value, dict):
        return {key: shape(below) for key, below in value.items()}
    return [shape(value[0])] if isinstance(value, list) and value else type(value).__name__


async def ask(url: str, **fields: object) -> bytes:
    async with aiohttp.ClientSession() as session, session.post(f"{url}/v1/chat/completions", json=fields) as reply:
        assert reply.status == 200
        return await reply.read()


def chunks_of(stream: bytes) -> list[Json]:
    *events, done, end = stream.split(b"\n\n")
    assert (done, end) == (b"data: [DONE]", b"")
    return [orjson.loads(event.removeprefix(b"data: ")) for event in events]


async def test_the_canned_engine_answers_in_the_fake_engines_shapes(engine: Server) -> None:
    streamed = {"stream": True, "stream_options": {"include_usage": True}}
    async with FakeEngine() as fake:
        whole, stream = await ask(fake.url, **ASKED, **EXTRAS), await ask(fake.url, **ASKED, **EXTRAS, **streamed)
    assert shape(orjson.loads(await ask(engine.url, **ASKED))) == shape(orjson.loads(whole))
    theirs, ours = chunks_of(stream), chunks_of(await ask(engine.url, **ASKED, **streamed))
    assert len(ours) == 1 + canned.CHUNKS + 1
    for place in (0, 1, -2, -1):
        assert shape(ours[place]) == shape(theirs[place])
    assert ours[-1]["usage"] == {"prompt_tokens": 2048, "completion_tokens": 256, "total_tokens": 2304}


def test_every_subject_is_measured_and_proves_what_it_recorded(
    engine: Server, load: LoadProcess, ours: OurGateway, folder: Path
) -> None:
    with bare_subjects(engine, folder) as bare:
        others = [ours.speaking(dialect) for dialect in SPOKEN if dialect != CHAT]
        course = Course(engine, load, [*bare, ours, *others])
        for subject in course.subjects:
            check_answers(subject)
        for kind in KINDS:
            course.run(kind, rounds=1, clients=4, seconds=0.2, say=lambda text: None)
            assert course.ratio("stepwell", "bare_recorder", kind) > 0
        bare[-1].open(1)
        with pytest.raises(AssertionError):
            bare[-1].check(1)
    assert len(course.rounds) == len(course.subjects) * len(KINDS)


def test_streams_are_held_and_a_crowd_is_served(engine: Server, load: LoadProcess, ours: OurGateway) -> None:
    watched = Watched(ours, load)
    hold_streams(watched, ours, engine, streams=20, seconds=1)
    crowd(watched, ours, calls=50)
    figures = watched.figures
    assert figures["tokens_sent"] == 20 * 10 * canned.A_CHUNK
    assert figures["tokens_not_recorded"] == figures["chunks_not_seen"] == figures["streams_errors"] == 0
    assert figures["streams_all_open_s"] >= 1
    assert figures["crowd_calls"] == 50
    assert figures["crowd_not_recorded"] == figures["crowd_errors"] == 0


def test_a_quantile_lies_within_its_bucket() -> None:
    lags = Histogram({0.1: 98.0, 0.2: 100.0, float("inf"): 100.0})
    assert 0.1 < lags.quantile(0.99) < 0.2
    assert lags.since(Histogram(dict.fromkeys(lags.counts, 0.0))) == lags
    assert Histogram({0.1: 0.0, float("inf"): 5.0}).quantile(0.99) == 0.1
