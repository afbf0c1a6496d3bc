"""Is what a trainer learns the policy gradient? Its direction against the exact one, for policies that can be counted.

Every rollout of a small task goes through a real pool as often as it is probable. The gradient that the reference
trainer, a loop over `pool_loader`, the TRL adapter and the verl rows give is compared with the exact gradient of the
expected return, which is computed by enumeration: 1 is the same direction. Each figure is the worst over the
temperatures.

    python -m benchmarks.truth
"""

from collections.abc import Iterator

import torch

from benchmarks.report import report
from benchmarks.truth_rig.episodes import FAR, SCENARIOS, Scenario, Task
from benchmarks.truth_rig.gradients import ours, with_loader, with_trl, with_verl
from stepwell.pool.client.batch import make_batch
from stepwell.steps.columns import stack
from stepwell.trainers.settings import Settings

TEMPERATURES = (0.5, 1.0, 1.5)
TRAINERS = ("ours", "loader", "trl", "verl", "verl_merged")
AT_LEAST = 0.999
MIXED = "ours_mixed_temperatures"
IGNORED = "control_temperature_ignored"
"""How far off a trainer is that takes every sample for one of temperature 1. It shows that the measure can fail."""


def cosine(some: torch.Tensor, other: torch.Tensor) -> float:
    """Small values count too."""
    return torch.nn.functional.cosine_similarity(some.double().ravel(), other.double().ravel(), dim=0).item()


def cosines(scenario: Scenario, temperature: float) -> Iterator[tuple[str, float]]:
    task = Task(scenario, temperature)
    batch, exact, kind = task.batch(), task.exact_gradient(), scenario.advantage
    gradients = {
        "ours": ours(batch, task.table, Settings(advantage=kind)),
        "loader": with_loader(batch, task.table, kind),
        "trl": with_trl(batch, task.table, kind, temperature),
        "verl": with_verl(batch, task.table, kind, temperature, merged=False),
        "verl_merged": with_verl(batch, task.table, kind, temperature, merged=True),
    }
    for trainer, gradient in gradients.items():
        yield f"{trainer}_{scenario.name}", cosine(gradient, exact)


def mixed_temperatures() -> float:
    """Two groups of one batch, sampled at different temperatures. As in GRPO, each counts by its deviation."""
    scenario = Scenario(name="mixed")
    cool, hot = (Task(scenario, temperature, prompt=prompt) for temperature, prompt in ((0.5, 5), (1.5, 3)))
    table = cool.table.clone()
    of_hot = hot.exact_gradient().abs().sum(1) > 0
    table[of_hot] = hot.table[of_hot]
    parts = [task.batch() for task in (cool, hot)]
    batch = make_batch(stack([part.columns for part in parts]), [len(part.columns) for part in parts])
    exact = cool.exact_gradient() / cool.deviation() + hot.exact_gradient() / hot.deviation()
    return cosine(ours(batch, table, Settings()), exact)


def temperature_ignored(temperature: float) -> float:
    task = Task(SCENARIOS[0], temperature)
    return cosine(with_trl(task.batch(), task.table, "rollout", temperature, divided_by=1.0), task.exact_gradient())


def capped(temperature: float) -> float:
    """Ours with an importance cap instead of the clip, for weights that changed much."""
    (scenario,) = [scenario for scenario in SCENARIOS if scenario.name == FAR]
    task = Task(scenario, temperature)
    return cosine(ours(task.batch(), task.table, Settings(importance_cap=2.0)), task.exact_gradient())


def measure() -> dict[str, float]:
    figures: dict[str, float] = {}
    for scenario in SCENARIOS:
        for temperature in TEMPERATURES:
            for name, value in cosines(scenario, temperature):
                figures[name] = min(value, figures.get(name, 1.0))
        print(scenario.name, {name: round(figures[f"{name}_{scenario.name}"], 6) for name in TRAINERS}, flush=True)
    figures[MIXED] = mixed_temperatures()
    figures[f"capped_{FAR}"] = min(map(capped, TEMPERATURES))
    figures[IGNORED] = min(map(temperature_ignored, TEMPERATURES))
    return figures


def main() -> None:
    torch.set_num_threads(1)
    figures = measure()
    promised = [name for name in figures if name.startswith(("ours_", "loader_")) and not name.endswith(FAR)]
    report(figures, at_least=dict.fromkeys(promised, AT_LEAST))


if __name__ == "__main__":
    main()
