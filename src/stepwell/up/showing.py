"""One screen of what happens: pure, from the status to its lines."""

from collections.abc import Iterator, Mapping, Sequence

from stepwell.up.shapes import Amount, Channel, Engine, Gateway, Pool, Scoring, Status

COLUMNS = ("", "groups", "ready", "trajectories", "steps", "tokens", "trained", "oldest")
NONE = "–"


def screen_of(status: Status) -> str:
    parts = {
        "pool": _pool(status.pool, status.pool_error),
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


def _pool(pool: Pool | None, error: str | None) -> list[str]:
    if pool is None or error is not None:
        return ["not reached"]
    kept = f"journal {pool.journal}" if pool.journal else "no journal: in memory alone"
    lines = [
        f"{pool.name} · {_count(pool.shards, 'shard')} · policy version {pool.policy_version} · {kept}",
        f"{_count(pool.submitted, 'step')} submitted · {_count(pool.leases, 'lease')}",
    ]
    if pool.scoring is not None and (scoring := _scoring(pool.scoring)):
        lines.append(scoring)
    return lines


def _scoring(scoring: Scoring) -> str:
    counted = {
        "scored": scoring.scored,
        "wait to be scored": scoring.waiting + scoring.under_way + scoring.resting,
        "could not be scored": sum(scoring.failed.values()),
    }
    return " · ".join(f"{number:,} {what}" for what, number in counted.items() if number)


def _channels(channels: Sequence[Channel]) -> list[str]:
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


def _row(channel: Channel) -> tuple[str, ...]:
    numbers = (
        channel.groups,
        channel.ready_groups,
        channel.trajectories,
        channel.held.steps,
        channel.held.tokens,
        channel.shipped.steps,
    )
    return (channel.name, *(f"{number:,}" for number in numbers), _age(channel.oldest_age) if channel.groups else NONE)


def _gateway(gateway: Gateway) -> str:
    if not gateway.ready:
        return f"{gateway.url} · not ready: {'; '.join(gateway.missing) or gateway.error or 'it does not answer'}"
    parts = [gateway.url, "ready", _count(gateway.calls, "call"), f"{gateway.in_flight or 0:,} in flight"]
    if gateway.p50 is not None and gateway.p95 is not None:
        parts.append(f"p50 {gateway.p50:.2g} s, p95 {gateway.p95:.2g} s")
    if gateway.waiting_steps:
        parts.append(f"{_count(gateway.waiting_steps, 'step')} not delivered yet")
    return " · ".join(parts)


def _engine(engine: Engine) -> str:
    known = {"version": engine.weight_version, "server": engine.server}
    parts = [engine.address, engine.state, *(f"{name} {value}" for name, value in known.items() if value)]
    return " · ".join((*parts, *([engine.why] if engine.why else [])))


def _lost(status: Status) -> Iterator[str]:
    """What will never be trained, by where and why."""
    for channel in status.channels:
        yield from _amounts(f"{channel.name}: dropped", channel.dropped)
        yield from _amounts(f"{channel.name}: left out", channel.left_out)
    if status.pool is not None:
        yield from _counts("pool: refused", status.pool.refused or {})
        yield from _counts("pool: quarantined", status.pool.quarantined or {})
    for gateway in status.gateways:
        yield from _counts(f"{gateway.url}: lost", gateway.lost)


def _amounts(what: str, by_cause: Mapping[str, Amount]) -> Iterator[str]:
    for cause, amount in by_cause.items():
        if amount.steps:
            yield f"{what}, {cause}: {_count(amount.steps, 'step')}, {_count(amount.tokens, 'token')}"


def _counts(what: str, by_cause: Mapping[str, int]) -> Iterator[str]:
    for cause, number in by_cause.items():
        if number:
            yield f"{what}, {cause}: {_count(number, 'step')}"


def _errors(status: Status) -> Iterator[str]:
    if status.pool_error:
        yield f"pool: {status.pool_error}"
    for gateway in status.gateways:
        if gateway.error:
            yield f"{gateway.url}: {gateway.error}"


def _count(number: int | None, what: str) -> str:
    return f"{number or 0:,} {what}{'' if number == 1 else 's'}"


def _age(seconds: float) -> str:
    for unit, length in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.1f} {unit}"
    return f"{seconds:.0f} s"
