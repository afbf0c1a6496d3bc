"""How often the guard is wrong, and how long it takes: simulated canaries, and simulated validation.

The guard's own test and its own validation decide; only rewards and scores are made up. A task is solved or not. The
stable version solves half of them: then rewards vary most. A canary gets a share of the sessions, and is worse by 0, a
half, one or two margins. It is watched for a day. Wrong is the rollback of an equal version and the promotion of one
that is worse by the margin or more. A canary without a decision is neither: it is counted when its alarm comes, and
after the day.

    python -m benchmarks.guard [--runs N]
    python -m benchmarks.guard --docs       # write the kept result into docs/guard.md
"""

import argparse
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from itertools import count
from statistics import median
from typing import NamedTuple

import numpy as np
from stepwell.trainers.guard.statistics import Scores, SequentialTest, refusal

from benchmarks.report import report
from benchmarks.results import CHECKOUT, read_results
from stepwell.pool.api.policy import VersionReward
from stepwell.trainers.guard.guard_settings import GuardSettings

PAGE = CHECKOUT / "docs" / "guard.md"
BEGIN, END = "<!-- begin: python -m benchmarks.guard --docs -->\n", "<!-- end -->\n"

SETTINGS = GuardSettings()
STABLE, CANARY = 1, 2
RATES = (1, 3, 10, 60)
"""Comparisons a minute: rewards of the canary."""
MARGINS = (0.0, 0.5, 1.0, 2.0)
"""By how many margins the canary is worse."""
SOLVED = 0.5
DAY = 86_400.0
RUNS = 2000
SEED = 0

TASKS = (20, 100, 500, 1000)
VALIDATED = 0.7
"""The share of the tasks that the stable version solves in validation."""
LOSSES = (0.05, 0.1, 0.15, 0.2, 0.3)
CHAIN = 120
"""Equal versions, one after the other; each that passes is stable then."""
AT_MOST = 0.05

Figures = dict[str, float]


class Ending(NamedTuple):
    action: str | None
    """None: there was no decision within a day."""
    seconds: float


def simulate(random: np.random.Generator, rate: float, margins: float, settings: GuardSettings = SETTINGS) -> Ending:
    """One canary. The guard looks whenever it got a reward: in between there is nothing to compare."""
    test, seconds = SequentialTest(settings), 0.0
    solved = SOLVED - margins * settings.margin
    for number in count():
        seconds += random.exponential(60 / rate)
        if seconds >= DAY:
            break
        test.add(list(_rewards(random, number, solved, settings.canary_share)), canary=CANARY, stable=STABLE)
        if (verdict := test.verdict()) is not None:
            return Ending(verdict.action, seconds)
    return Ending(None, DAY)


def _rewards(random: np.random.Generator, number: int, solved: float, share: float) -> Iterator[VersionReward]:
    """Some of the stable version, and then one of the canary; each of a session of its own."""
    for other, chance in enumerate(random.random(random.geometric(share) - 1)):
        yield VersionReward(STABLE, float(chance < SOLVED), f"{number}-{other}")
    yield VersionReward(CANARY, float(random.random() < solved), f"{number}")


def cell(rate: float, margins: float, runs: int) -> Figures:
    """How the canaries of one rate and one difference end."""
    random = np.random.default_rng([SEED, round(60 * rate), round(10 * margins)])
    endings = [simulate(random, rate, margins) for _ in range(runs)]
    name = cell_name(rate, margins)
    return {
        f"{name}_promoted": _share(ending.action == "promote" for ending in endings),
        f"{name}_rolled_back": _share(ending.action == "rollback" for ending in endings),
        f"{name}_undecided": _share(ending.action is None for ending in endings),
        f"{name}_overdue": _share(ending.seconds >= SETTINGS.alarm_after for ending in endings),
        f"{name}_minutes": round(median(ending.seconds for ending in endings) / 60, 2),
    }


def cell_name(rate: float, margins: float) -> str:
    return f"rate_{rate:g}_margins_{margins:g}".replace(".", "_")


def wrong(rate: float, margins: float) -> str | None:
    """The figure that counts wrong decisions of this cell; None if neither decision is wrong."""
    if not margins:
        return f"{cell_name(rate, margins)}_rolled_back"
    return f"{cell_name(rate, margins)}_promoted" if margins >= 1.0 else None


def scores(random: np.random.Generator, solved: float, tasks: int) -> Scores:
    return {str(task): value for task, value in enumerate(random.binomial(1, solved, tasks).tolist())}


def validation(tasks: int, runs: int) -> Figures:
    """How often a version is refused that solves fewer tasks by each loss, and one that is equal."""
    random = np.random.default_rng([SEED, tasks])

    def stable() -> Scores:
        return scores(random, VALIDATED, tasks)

    def refused(loss: float) -> float:
        versions = (scores(random, VALIDATED - loss, tasks) for _ in range(runs))
        return _share(refusal(new, STABLE, stable(), stable, SETTINGS) is not None for new in versions)

    return {
        f"validation_{tasks}_equal_refused": refused(0.0),
        **{f"validation_{tasks}_loss_{round(100 * loss):02}_refused": refused(loss) for loss in LOSSES},
    }


def chain(tasks: int, chains: int) -> Figures:
    """Equal versions, the last twenty of many: validation must not become stricter with their number."""
    random, refused = np.random.default_rng([SEED, tasks, chains]), []
    for _ in range(chains):
        kept: Scores | None = None
        for number in range(CHAIN):
            new, again = scores(random, VALIDATED, tasks), scores(random, VALIDATED, tasks)
            is_refused = refusal(new, STABLE, kept, partial(_same, again), SETTINGS) is not None
            kept = again if is_refused else new
            if number >= CHAIN - 20:
                refused.append(is_refused)
    return {f"validation_{tasks}_equal_refused_after_100": _share(refused)}


def _same(found: Scores) -> Scores:
    return found


def measure(runs: int) -> Figures:
    figures: Figures = {}
    for rate in RATES:
        for margins in MARGINS:
            figures |= cell(rate, margins, runs)
    for tasks in TASKS:
        figures |= validation(tasks, runs)
    return figures | chain(100, max(1, runs // 20))


def at_most(figures: Figures) -> Figures:
    wrong_ones = {name for rate in RATES for margins in MARGINS if (name := wrong(rate, margins)) is not None}
    targets = [name for name in figures if name in wrong_ones or "equal_refused" in name]
    return dict.fromkeys(targets, AT_MOST)


def tables(figures: Mapping[str, float]) -> str:
    """For docs/guard.md."""
    lines = [
        "| rewards of the canary a minute | worse by | promoted | rolled back | overdue after 10 min | median time |"
    ]
    lines.append("|---|---|---|---|---|---|")
    words = {0.0: "0", 0.5: "half the margin", 1.0: "the margin", 2.0: "2 × the margin"}
    for rate in RATES:
        for margins in MARGINS:
            name = cell_name(rate, margins)
            promoted, rolled_back, undecided, overdue, minutes = (
                figures[f"{name}_{what}"] for what in ("promoted", "rolled_back", "undecided", "overdue", "minutes")
            )
            assert not undecided, "the table has no column for it"
            shares = " | ".join(f"{100 * share:.1f} %" for share in (promoted, rolled_back, overdue))
            lines.append(f"| {rate} | {words[margins]} | {shares} | {minutes:.1f} min |")
    lines += ["", "| tasks | " + " | ".join(f"refused, {_loss(loss)}" for loss in (0.0, *LOSSES)) + " |"]
    lines.append("|---" * (len(LOSSES) + 2) + "|")
    for tasks in TASKS:
        names = ["equal_refused", *(f"loss_{round(100 * loss):02}_refused" for loss in LOSSES)]
        shares = " | ".join(f"{100 * figures[f'validation_{tasks}_{name}']:.1f} %" for name in names)
        lines.append(f"| {tasks} | {shares} |")
    return "\n".join(lines)


def with_tables(page: str, figures: Mapping[str, float]) -> str:
    before, begin, rest = page.partition(BEGIN)
    return f"{before}{begin}\n{tables(figures)}\n\n{END}{rest.partition(END)[2]}"


def _loss(loss: float) -> str:
    return f"{loss:g} worse" if loss else "equal"


def _share(found: Iterable[bool]) -> float:
    return float(np.mean(list(found)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=RUNS, help="of each cell")
    parser.add_argument("--docs", action="store_true", help="write the kept result into docs/guard.md")
    options = parser.parse_args()
    if options.docs:
        PAGE.write_text(with_tables(PAGE.read_text(), read_results()["guard"].figures))
        return
    figures = measure(options.runs)
    print(tables(figures))
    report(figures, at_most=at_most(figures))


if __name__ == "__main__":
    main()
