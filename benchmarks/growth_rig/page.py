"""What docs/operations/scaling.md shows of the figures: the tables of the curves, and the sizes with their arithmetic.

The page has a pair of marks for each part. The text between them is made here.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.gateway_rig import canned
from benchmarks.growth_rig.curve import Curve, Figures
from benchmarks.growth_rig.sizing import GATEWAY_BUSY, LOAD, SHARD_BUSY, WAITS, call_ms, history_ms
from benchmarks.growth_rig.tables import curve_table, shown, sizing_table

CHECKOUT = Path(__file__).parents[2]
PAGE = CHECKOUT / "docs" / "operations" / "scaling.md"
PICTURES = CHECKOUT / "docs" / "images"


def curve_tables(curves: Mapping[str, Sequence[Curve]], figures: Figures) -> str:
    return "\n\n".join(f"### {title}\n\n{curve_table(those, figures)}" for title, those in curves.items())


def sizes(figures: Figures) -> str:
    return f"{arithmetic(figures)}\n\n{sizing_table(figures)}"


def arithmetic(figures: Figures) -> str:
    """Each formula with the measured numbers."""
    counted, step = figures["step_bytes_counted"], figures["step_bytes"]
    history, longer = LOAD.history_tokens, LOAD.history_tokens - canned.PROMPT
    whole, streamed = (call_ms(figures, LOAD, streamed=streamed) for streamed in (False, True))
    response = f"{LOAD.response_tokens} ÷ {canned.RESPONSE}"
    more = f"{longer:,} ÷ 1,000 × {shown(history_ms(figures))} ms"
    shard_mb = figures["shards_resident_mb_at_64"] / 64
    waiting = f"{WAITS.batches} × {WAITS.batch_rollouts:,} × {LOAD.calls_a_rollout}"
    lines = (
        f"**Calls a second** = agents ÷ {LOAD.seconds_a_call:g} s. In flight: × {LOAD.answer_seconds:g} s.",
        f"**CPU of a gateway for a call** = {shown(figures['call_cpu_ms'])} ms × {response} + {more} = "
        f"{shown(whole)} ms. Streamed, a chunk every 10 ms: {shown(figures['streamed_call_cpu_ms'])} ms × {response} + "
        f"the same = {shown(streamed)} ms. The first term is the measured call, in proportion to its response; the "
        f"second is the slope over turns, for a history of {history:,} tokens in place of {canned.PROMPT:,}.",
        f"**Gateway processes** = calls a second × that ÷ {GATEWAY_BUSY:g}, rounded up: each may need "
        f"{GATEWAY_BUSY:.0%} of a core.",
        f"**Memory of the gateways** = processes × {shown(figures['gateway_mb'])} MB + calls in flight × "
        f"{shown(figures['call_in_flight_kb'])} KB.",
        f"**Spools** = {WAITS.spool_seconds:g} s without the pool × calls a second × {shown(counted)} bytes.",
        f"**Cores for shards** = calls a second × {shown(figures['waiting_producers_step_cpu_us_at_256'])} µs: a step "
        "that comes in a message of its own, the dearest case. "
        f"**Shards** = that ÷ {SHARD_BUSY:g}, rounded up: half of a core is for fetches and restarts.",
        f"**Held steps** = agents × {LOAD.held_steps} + {waiting}: rollouts under way, and the batches that wait.",
        f"**Memory of the shards** = agents × {shown(figures['trajectory_bytes'])} bytes + held steps × {shown(step)} "
        f"bytes + shards × {shown(shard_mb)} MB. **Journals** = held steps × {shown(counted)} bytes; every new byte is "
        "written twice, to the write-ahead log and to the file.",
        "**Restart of a shard** = held steps ÷ shards × "
        f"{shown(figures['held_steps_journal_restart_cpu_s_at_1000000'])} s ÷ 1,000,000, for small steps.",
    )
    return "\n".join(f"- {line}" for line in lines)


def with_parts(page: str, parts: Mapping[str, str]) -> str:
    """The page with these texts between their marks."""
    for name, text in parts.items():
        marks = f"<!-- {name} -->", f"<!-- end of {name} -->"
        pattern = re.compile(f"{re.escape(marks[0])}.*?{re.escape(marks[1])}", re.DOTALL)
        (before,) = pattern.findall(page)
        page = page.replace(before, f"{marks[0]}\n\n{text}\n\n{marks[1]}")
    return page
