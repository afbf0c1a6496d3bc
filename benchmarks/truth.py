"""Is what a trainer learns the policy gradient? Its direction against the exact one, for policies that can be counted.

Every rollout of a small task goes through a real pool as often as it is probable. The gradient that the reference
trainer, a loop over `pool_loader`, TRL and verl give is compared with the exact gradient of the expected return, which
is computed by enumeration: 1 is the same direction. Each figure is the worst over the temperatures.

Baselines, loss aggregations and units have rollouts of two prompts, in groups and as sessions without siblings: there,
the whole gradient of the reference trainer is compared with one that follows from the definitions (1 minus the relative
error), and its direction with the exact one where they should be the same.

Data that was recorded without log-probabilities is compared with the same data that has them: with old ones computed by
the weights that sampled, the gradient is the same; with current ones it is so where these sampled.

TRL and verl compute with their own code where their environments are installed (scripts/trainer_envs.py).

    python -m benchmarks.truth
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import permutations, product

import torch

from benchmarks.report import parse_no_options, report
from benchmarks.truth_rig.episodes import FAR, SCENARIOS, Scenario, Task
from benchmarks.truth_rig.gradients import Case, ours, recomputed, silent, with_loader, with_trl
from benchmarks.truth_rig.other_trainers import OtherTrainers, gradients_of
from benchmarks.truth_rig.sessions import CASES, BaselineCase, Sessions, agreement
from stepwell.pool.client.batch import make_batch
from stepwell.steps.columns import stack
from stepwell.trainers.settings import Settings

TEMPERATURES = (0.5, 1.0, 1.5)
AT_LEAST = 0.999
MIXED = "ours_mixed_temperatures"
IGNORED = "control_temperature_ignored"
"""How far off a trainer is that takes every sample for one of temperature 1. It shows that the measure can fail."""
OTHER_CREDIT = "control_other_credit"
"""How close a trainer comes that has another setting for the credit of a tree's steps."""

WITHOUT = ("plain", "forks", "in_flight", FAR)
"""The scenarios whose data is also trained without recorded log-probabilities."""
CURRENT = "control_current_for_old_weights"
"""How close the current weights' log-probabilities come where others sampled a part of the data."""

SOME = 5
"""A batch with every fifth rollout shows which mean is subtracted."""
OTHER_BASELINE = "control_other_baseline"
OTHER_AGGREGATION = "control_other_aggregation"
"""How close a trainer comes that has another baseline, or another aggregation."""


def cosine(some: torch.Tensor, other: torch.Tensor) -> float:
    """Small values count too."""
    return torch.nn.functional.cosine_similarity(some.double().ravel(), other.double().ravel(), dim=0).item()


def case_of(task: Task) -> Case:
    scenario = task.scenario
    return Case(task.batch(), task.table, scenario.advantage, task.temperature, credit=scenario.credit)


def worst_cosines(
    scenarios: Sequence[Scenario] = SCENARIOS,
    temperatures: Sequence[float] = TEMPERATURES,
    others: OtherTrainers = gradients_of,
) -> tuple[dict[str, float], dict[str, str]]:
    """By trainer and scenario; and by trainer, whose code computed the gradient."""
    tasks = [Task(scenario, temperature) for scenario, temperature in product(scenarios, temperatures)]
    cases = [case_of(task) for task in tasks]
    trl = others("trl", cases)
    verl = others("verl", [*cases, *(replace(case, merged=True) for case in cases)])
    gradients = {
        "ours": [
            ours(case.batch, case.table, Settings(advantage=case.advantage, credit=case.credit)) for case in cases
        ],
        "loader": [with_loader(case) for case in cases],
        "trl": trl.gradients,
        "verl": verl.gradients[: len(cases)],
        "verl_merged": verl.gradients[len(cases) :],
    }
    worst: dict[str, float] = {}
    for trainer, of_cases in gradients.items():
        for task, gradient in zip(tasks, of_cases, strict=True):
            name = f"{trainer}_{task.scenario.name}"
            worst[name] = min(cosine(gradient, task.exact_gradient()), worst.get(name, 1.0))
    merged = f"{verl.computed_by}, merged rows"
    return worst, {
        "ours": "ours",
        "loader": "loader",
        "trl": trl.computed_by,
        "verl": verl.computed_by,
        "verl_merged": merged,
    }


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
    case = Case(task.batch(), task.table, "rollout", temperature)
    return cosine(with_trl(case, divided_by=1.0), task.exact_gradient())


def without_logprobs(
    names: Sequence[str] = WITHOUT,
    temperatures: Sequence[float] = TEMPERATURES,
    others: OtherTrainers = gradients_of,
) -> dict[str, float]:
    """By scenario, the cosine of the gradients with recorded and with recomputed log-probabilities, of all steps and of
    every second one; and by trainer, that with current ones where the current weights sampled."""
    scenarios = [scenario for scenario in SCENARIOS if scenario.name in names]
    worst: dict[str, float] = {}
    settings, at_hand = Settings(old_logprobs="recomputed"), []
    for scenario, temperature in product(scenarios, temperatures):
        task = Task(scenario, temperature)
        case = case_of(task)
        recorded = ours(case.batch, case.table, settings)
        for label, every in (("", 1), ("_mixed", 2)):
            name = f"recomputed_{scenario.name}{label}"
            found = recomputed(silent(case.batch, every), task.tables, settings)
            worst[name] = min(cosine(found, recorded), worst.get(name, 1.0))
        if not scenario.weight_change:
            at_hand.append((replace(case, batch=silent(case.batch)), recorded))
    cases = [case for case, _ in at_hand]
    if not cases:
        return worst
    gradients = {
        "loader": [with_loader(case) for case in cases],
        "trl": others("trl", cases).gradients,
        "verl": others("verl", cases).gradients,
    }
    for trainer, of_cases in gradients.items():
        pairs = zip(of_cases, at_hand, strict=True)
        worst[f"current_{trainer}"] = min(cosine(gradient, recorded) for gradient, (_, recorded) in pairs)
    return worst


def current_for_old_weights(temperature: float) -> float:
    (scenario,) = [scenario for scenario in SCENARIOS if scenario.name == FAR]
    task, settings = Task(scenario, temperature), Settings(old_logprobs="current")
    found = recomputed(silent(task.batch()), task.tables, settings)
    return cosine(found, ours(task.batch(), task.table, settings))


def other_credit(temperature: float) -> float:
    """The best of ours with a credit that is not the scenario's."""
    tasks = [Task(scenario, temperature) for scenario in SCENARIOS if scenario.is_tree]
    return max(
        cosine(ours(task.batch(), task.table, Settings(credit=other.scenario.credit)), task.exact_gradient())
        for task, other in permutations(tasks, 2)
    )


def capped(temperature: float) -> float:
    """Ours with an importance cap instead of the clip, for weights that changed much."""
    (scenario,) = [scenario for scenario in SCENARIOS if scenario.name == FAR]
    task = Task(scenario, temperature)
    return cosine(ours(task.batch(), task.table, Settings(importance_cap=2.0)), task.exact_gradient())


def of_cases(cases: Sequence[BaselineCase] = CASES) -> dict[str, float]:
    """By case: agreement with its definition, and the cosine with the exact gradient where it should be 1."""
    every, some, figures = Sessions(), Sessions(every=SOME), {}
    for case in cases:
        figures[f"ours_case_{case.name}"] = agreement(some.trained_gradient(case), some.defined_gradient(case))
        if case.is_exact:
            figures[f"ours_exact_{case.name}"] = cosine(every.trained_gradient(case), every.exact_gradient())
    return figures


def other_setting(*names: str) -> float:
    """The best agreement of one of these cases' settings with the definition of another, on the other's batch."""
    sessions, cases = Sessions(every=SOME), [case for case in CASES if case.name in names]
    return max(
        agreement(sessions.trained_gradient(case, other.settings), sessions.defined_gradient(case))
        for case, other in permutations(cases, 2)
    )


def print_cases(figures: dict[str, float]) -> None:
    print(f"{'':<32}{'by its definition':>26}{'exact direction':>26}")
    for case in CASES:
        exact = figures.get(f"ours_exact_{case.name}")
        told = "" if exact is None else f"{exact:.6f}"
        print(f"{case.name:<32}{figures[f'ours_case_{case.name}']:>26.6f}{told:>26}")


def print_table(figures: dict[str, float], computed_by: dict[str, str]) -> None:
    print(" " * 32, *(f"{title:>26}" for title in computed_by.values()), sep="")
    for scenario in SCENARIOS:
        values = (figures[f"{trainer}_{scenario.name}"] for trainer in computed_by)
        print(f"{scenario.name:<32}", *(f"{value:>26.6f}" for value in values), sep="")


def measure() -> dict[str, float]:
    figures, computed_by = worst_cosines()
    print_table(figures, computed_by)
    figures[MIXED] = mixed_temperatures()
    figures[f"capped_{FAR}"] = min(map(capped, TEMPERATURES))
    figures |= without_logprobs()
    figures[CURRENT] = max(map(current_for_old_weights, TEMPERATURES))
    figures[IGNORED] = min(map(temperature_ignored, TEMPERATURES))
    figures[OTHER_CREDIT] = max(map(other_credit, TEMPERATURES))
    cases = of_cases()
    print_cases(cases)
    figures |= cases
    figures[OTHER_BASELINE] = other_setting("batch", "none", "group_undivided")
    figures[OTHER_AGGREGATION] = other_setting("group", "sequence_mean", "fixed_length")
    return figures


def main() -> None:
    parse_no_options(__doc__)
    torch.set_num_threads(1)
    figures = measure()
    promised = [name for name in figures if name.startswith(("ours_", "loader_")) and not name.endswith(FAR)]
    promised += [name for name in figures if name.startswith(("recomputed_", "current_"))]
    report(figures, at_least=dict.fromkeys(promised, AT_LEAST))


if __name__ == "__main__":
    main()
