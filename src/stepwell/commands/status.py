"""`stepwell status`: asks a dashboard over HTTP and prints its status on one screen."""

import json
from collections.abc import Iterator, Mapping, Sequence

from pydantic import BaseModel, Field, ValidationError

from stepwell.commands.sections import Section
from stepwell.commands.state_folder import this_folder
from stepwell.common.command_line import say
from stepwell.common.http import JsonAnswer, get_json
from stepwell.dashboard.gateway_monitor import GatewayNow
from stepwell.errors import Forbidden, NotReady
from stepwell.pool.api.stats import ArchiveStats, ScoringStats, StepCount
from stepwell.wire.gateway_api import EngineNow

TIMEOUT = 15.0
"""Seconds: the dashboard itself waits up to three for the gateways and two for the pool."""
COLUMNS = ("", "groups", "ready", "trajectories", "steps", "tokens", "trained", "oldest")
NONE = "–"


class StatusSettings(Section, env_prefix="STEPWELL_STATUS_"):
    """Show the pool, its channels, the gateways, the engines, and which data was lost and why, on one screen.

    The status is that of `stepwell up` in this folder, or of any dashboard, asked over HTTP.
    """

    examples = ("stepwell status", "stepwell status --url http://10.0.0.5:8200 --json")

    url: str | None = None
    """Address of the dashboard; without it, the one of `stepwell up` in this folder."""
    key: str | None = None
    """Control key of the dashboard. Prefer STEPWELL_STATUS_KEY: other users can read a command line."""
    as_json: bool = Field(default=False, alias="json")
    """Print the dashboard's whole answer as JSON."""


class ShownPool(BaseModel):
    name: str
    shards: int
    journal: str | None
    policy_version: int
    submitted: int
    leases: int
    refused: dict[str, int]
    quarantined: dict[str, int]
    scoring: ScoringStats
    archiving: ArchiveStats = ArchiveStats()
    removal_waits: int = 0
    overdue_by_clock: int = 0
    missing: list[str] = []


class ShownChannel(BaseModel):
    name: str
    groups: int
    ready_groups: int
    trajectories: int
    held: StepCount
    shipped: StepCount
    dropped: dict[str, StepCount]
    left_out: dict[str, StepCount]
    oldest_age: float


class ShownEngine(EngineNow):
    gateway: str


class ShownPolicy(BaseModel):
    alarm: str | None = None


class ShownStatus(BaseModel):
    """The part of the dashboard's /api/status that is printed; other fields are ignored."""

    version: str
    pool: ShownPool | None
    policy: ShownPolicy | None = None
    channels: list[ShownChannel]
    notes: list[str] = []
    gateways: list[GatewayNow]
    engines: list[ShownEngine]
    pool_error: str | None


def run_status(settings: StatusSettings) -> None:
    url, key = (settings.url.rstrip("/"), settings.key) if settings.url else _dashboard_of_this_folder()
    answer = get_json(f"{url}/api/status?fresh=true", key, TIMEOUT)
    status = _read(url, answer)
    say(json.dumps(answer.body, indent=2) if settings.as_json else status_text(status))


def _dashboard_of_this_folder() -> tuple[str, str]:
    folder = this_folder()
    record = folder.record() if folder.is_occupied() else None
    if record is None:
        raise NotReady("nothing is running in this folder: start it with `stepwell up`, or name a dashboard with --url")
    if not record.is_ready:
        raise NotReady("it is not ready yet: the terminal of `stepwell up` says what it waits for")
    return record.dashboard, folder.key()


def _read(url: str, answer: JsonAnswer) -> ShownStatus:
    if answer.status in (401, 403):
        raise Forbidden(f"the dashboard at {url} requires its control key: --key, or STEPWELL_STATUS_KEY")
    try:
        if answer.status == 200:
            return ShownStatus.model_validate(answer.body)
    except ValidationError:
        raise NotReady(f"{url} is not a dashboard of this version of Stepwell: its answer cannot be read") from None
    raise NotReady(f"the dashboard at {url} does not answer: {answer.message}; see .stepwell/logs/dashboard.log")


def status_text(status: ShownStatus) -> str:
    parts = {
        "pool": _pool(status.pool),
        "channels": _channels(status.channels),
        "gateways": [_gateway(gateway) for gateway in status.gateways] or ["none"],
        "engines": [_engine(engine) for engine in status.engines] or ["none is known yet"],
        "lost": [*_lost(status)] or ["nothing"],
        "errors": [*_errors(status)] or ["none"],
    }
    lines = [_titled(title, lines) for title, lines in parts.items()]
    return "\n".join((f"stepwell {status.version}", *lines))


def _titled(title: str, lines: Sequence[str]) -> str:
    return "\n".join(
        f"{name:9} {line}".rstrip() for name, line in zip((title, *[""] * len(lines)), lines, strict=False)
    )


def _pool(pool: ShownPool | None) -> list[str]:
    if pool is None:
        return ["not reached"]
    journal = f"journal {pool.journal}" if pool.journal else "no journal: in memory only"
    lines = [
        f"{pool.name} · {_count(pool.shards, 'shard')} · policy version {pool.policy_version} · {journal}",
        f"{_count(pool.submitted, 'step')} submitted · {_count(pool.leases, 'lease')}",
    ]
    if pool.missing:
        lines.append(f"not counted, because it does not answer: {', '.join(pool.missing)}")
    scoring = {
        "scored": pool.scoring.scored,
        "wait to be scored": pool.scoring.waiting + pool.scoring.under_way + pool.scoring.resting,
        "could not be scored": sum(pool.scoring.failed.values()),
    }
    counts = " · ".join(f"{number:,} {what}" for what, number in scoring.items() if number)
    return [*lines, counts] if counts else lines


def _channels(channels: Sequence[ShownChannel]) -> list[str]:
    if not channels:
        return ["none yet: no trajectory was opened"]
    rows = [COLUMNS, *map(_row, channels)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(COLUMNS))]
    return [
        "  ".join(
            (row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)))
        )
        for row in rows
    ]


def _row(channel: ShownChannel) -> tuple[str, ...]:
    numbers = (
        channel.groups,
        channel.ready_groups,
        channel.trajectories,
        channel.held.steps,
        channel.held.tokens,
        channel.shipped.steps,
    )
    return (channel.name, *(f"{number:,}" for number in numbers), _age(channel.oldest_age) if channel.groups else NONE)


def _gateway(gateway: GatewayNow) -> str:
    if not gateway.ready:
        return f"{gateway.url} · not ready: {'; '.join(gateway.missing) or gateway.error or 'it does not answer'}"
    parts = [gateway.url, "ready", _count(gateway.calls, "call"), f"{gateway.in_flight:,} in flight"]
    if gateway.p50 is not None and gateway.p95 is not None:
        parts.append(f"p50 {gateway.p50:.2g} s, p95 {gateway.p95:.2g} s")
    if gateway.waiting_steps:
        parts.append(f"{_count(gateway.waiting_steps, 'step')} not delivered yet")
    return " · ".join(parts)


def _engine(engine: ShownEngine) -> str:
    known = {"version": engine.weight_version, "server": engine.server}
    parts = [engine.address, engine.state, *(f"{name} {value}" for name, value in known.items() if value)]
    return " · ".join((*parts, *([engine.why] if engine.why else [])))


def _lost(status: ShownStatus) -> Iterator[str]:
    """Data that will never be trained on, by place and cause."""
    for channel in status.channels:
        yield from _amounts(f"{channel.name}: dropped", channel.dropped)
        yield from _amounts(f"{channel.name}: left out", channel.left_out)
    if status.pool is not None:
        yield from _counts("pool: refused", status.pool.refused)
        yield from _counts("pool: quarantined", status.pool.quarantined)
        if status.pool.archiving.dropped_groups:
            yield f"archive: {_count(status.pool.archiving.dropped_groups, 'group')}, because too many waited"
    for gateway in status.gateways:
        yield from _counts(f"{gateway.url}: lost", gateway.lost)
    yield from status.notes


def _amounts(what: str, by_cause: Mapping[str, StepCount]) -> Iterator[str]:
    for cause, amount in by_cause.items():
        if amount.steps:
            yield f"{what}, {cause}: {_count(amount.steps, 'step')}, {_count(amount.tokens, 'token')}"


def _counts(what: str, by_cause: Mapping[str, int]) -> Iterator[str]:
    for cause, number in by_cause.items():
        if number:
            yield f"{what}, {cause}: {_count(number, 'step')}"


def _errors(status: ShownStatus) -> Iterator[str]:
    if status.pool_error:
        yield f"pool: {status.pool_error}"
    if status.pool is not None and status.pool.archiving.failures:
        archive = status.pool.archiving
        yield f"archive: {_count(archive.failures, 'failed write')}; {_count(archive.waiting_groups, 'group')} wait"
    if status.policy is not None and status.policy.alarm:
        yield f"canary: {status.policy.alarm}"
    if status.pool is not None and status.pool.removal_waits:
        yield f"forgetting: {_count(status.pool.removal_waits, 'shard')} cannot go on now; the log says why"
    if status.pool is not None and status.pool.overdue_by_clock:
        kept = status.pool.overdue_by_clock
        yield f"retention: {kept:,} trajectories are too old by the clock alone: stepwell forget --overdue"
    for gateway in status.gateways:
        for why in (gateway.error, *gateway.missing):
            if why:
                yield f"{gateway.url}: {why}"


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def _age(seconds: float) -> str:
    for unit, length in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.1f} {unit}"
    return f"{seconds:.0f} s"
