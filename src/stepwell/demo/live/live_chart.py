"""The picture of a live run: acceptance over time, with the versions' promotions and the rollback."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from stepwell.common.optional import require
from stepwell.demo.live.live_outcome import GOAL, LiveRecord
from stepwell.demo.live.turns import WINDOW, running_acceptance
from stepwell.pool.api.policy import PolicyDecision


def write_picture(record: LiveRecord, title: str, path: Path) -> None:
    require("matplotlib", "demo")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure: Any = Figure(figsize=(8, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot(title=title, xlabel="seconds", ylabel="acceptance by users", ylim=(0, 1.02))
    began_at, decisions, points = record.began_at, record.decisions, running_acceptance(record.turns)
    seconds, means = [at - began_at for at, _ in points], [mean for _, mean in points]
    axes.plot(seconds, means, color="tab:blue", label=f"of the last {WINDOW} replies")
    axes.axhline(GOAL, color="grey", linewidth=0.8, linestyle="--")
    promoted = [decision.at - began_at for decision in decisions if decision.action == "promote"]
    axes.plot(promoted, [0.02] * len(promoted), "|", color="tab:green", markersize=10, label="version promoted")
    _mark_rollbacks(axes, decisions, began_at)
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    figure.savefig(path, dpi=120)


def _mark_rollbacks(axes: Any, decisions: Sequence[PolicyDecision], began_at: float) -> None:
    canaries = {decision.version: decision.at - began_at for decision in decisions if decision.action == "canary"}
    label: str | None = "canary rolled back"
    for decision in decisions:
        if decision.action == "rollback":
            ended = decision.at - began_at
            axes.axvspan(canaries.get(decision.version, ended), ended, color="tab:red", alpha=0.3, label=label)
            axes.annotate(f"v{decision.version}", (ended, 0.1), color="tab:red", fontsize=8)
            label = None
