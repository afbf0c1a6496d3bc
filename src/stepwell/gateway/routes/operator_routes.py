"""For whoever runs the gateway: is it alive, is it ready, what does it see, which engines does it use."""

from collections.abc import Iterator
from typing import Annotated

from fastapi import APIRouter, Query, Response

from stepwell.engines.fleet import EngineFleet
from stepwell.engines.replica import EngineState
from stepwell.gateway.agent_calls import AgentCalls
from stepwell.gateway.http.error_responses import relayed
from stepwell.gateway.http.metrics import GatewayMetrics
from stepwell.gateway.recording.outbox import Outbox
from stepwell.gateway.recording.spool import Spool
from stepwell.gateway.routes.readiness import ReadinessCheck
from stepwell.wire import gateway_api as shapes


def operator_router(engines: EngineFleet, readiness: ReadinessCheck, sight: GatewayMetrics) -> APIRouter:
    router = APIRouter()

    @router.get("/health")
    async def health() -> dict[str, str]:
        """Answers while the process lives."""
        return {"status": "ok"}

    @router.get("/ready", responses={503: {"model": shapes.Readiness}})
    async def ready(response: Response) -> shapes.Readiness:
        """503 until the tokenizer, the pool, an engine and the reward worker, if one was named, are there."""
        missing = await readiness.missing()
        response.status_code = 503 if missing else 200
        return shapes.Readiness(ready=not missing, missing=missing)

    @router.get("/metrics")
    async def metrics() -> Response:
        """What the gateway has seen, for Prometheus."""
        body, content_type = sight.exposition()
        return Response(body, media_type=content_type)

    @router.get("/engines")
    async def engines_now() -> shapes.EngineList:
        """The engines and how they are."""
        return _listed(engines)

    @router.post("/engines")
    async def add_engine(wanted: shapes.EngineAddress) -> shapes.EngineList:
        """Use one engine more, from now on."""
        await engines.add(wanted.address)
        return _listed(engines)

    @router.delete("/engines")
    async def remove_engine(address: Annotated[shapes.Address, Query()]) -> shapes.EngineList:
        """Send no more calls to an engine; those in flight there go on to their end."""
        await engines.remove(address)
        return _listed(engines)

    @router.get("/v1/models")
    async def models() -> Response:
        """The engines' models."""
        status, body = await engines.models()
        return relayed(status, body)

    return router


def show(sight: GatewayMetrics, calls: AgentCalls, engines: EngineFleet, recorder: Outbox, spool: Spool | None) -> None:
    """What has its value elsewhere and is read when /metrics is."""

    def states() -> Iterator[tuple[tuple[str, ...], float]]:
        for view in engines.states():
            for state in EngineState:
                yield (view.address, state), float(view.state is state)

    sight.read_from("stepwell_in_flight", "Agents' calls in flight.", (), lambda: [((), calls.in_flight)])
    sight.read_from("stepwell_engine_state", "1 for the state an engine is in.", ("engine", "state"), states)
    sight.read_from(
        "stepwell_engine_in_flight",
        "Calls in flight at an engine.",
        ("engine",),
        lambda: [((view.address,), view.in_flight) for view in engines.states()],
    )
    sight.read_from("stepwell_waiting_steps", "Steps on their way to the pool.", (), lambda: [((), recorder.waiting)])
    sight.read_from("stepwell_waiting_bytes", "Their size.", (), lambda: [((), recorder.waiting_bytes)])
    sight.read_from(
        "stepwell_delivered_steps",
        "Steps the pool has answered for.",
        ("verdict",),
        lambda: [((str(verdict),), count) for verdict, count in recorder.delivered.items()],
        kind="counter",
    )
    sight.read_from(
        "stepwell_lost_steps",
        "Steps that did not get into the pool.",
        ("cause",),
        lambda: [((str(cause),), count) for cause, count in recorder.lost.items()],
        kind="counter",
    )
    if spool is not None:
        sight.read_from(
            "stepwell_spool_unwritten_steps",
            "Steps that the spool's disk did not take.",
            (),
            lambda: [((), spool.unwritten)],
            kind="counter",
        )


def _listed(engines: EngineFleet) -> shapes.EngineList:
    return shapes.EngineList(
        engines=[
            shapes.EngineNow(
                address=view.address,
                state=view.state,
                why=view.why,
                in_flight=view.in_flight,
                weight_version=view.weight_version,
                server=view.facts.server_version,
            )
            for view in engines.states()
        ]
    )
