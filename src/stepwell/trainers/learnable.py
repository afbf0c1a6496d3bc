"""Whether batches teach anything: the first one that does not is reported, and a run of them ends the training.

Without this, a trainer acknowledges group after group and its weights stay the same.
"""

import logging
from collections import Counter
from dataclasses import asdict

from stepwell.errors import NothingLearned
from stepwell.steps.rows import NO_VERSION
from stepwell.trainers.rows import TrainedRows

log = logging.getLogger("stepwell.trainers")

REASONS = {
    "groups_single": (
        "groups of one (a single scored rollout), which baseline group or leave_one_out compares with nothing",
        "set fallback_baseline to running if there are no others of a group, as in live sessions; else give the "
        "rollouts of one prompt the same prompt_uid, and groups two rollouts or more (group_size)",
    ),
    "groups_identical": (
        "groups whose rollouts are the same token for token",
        "sample at a temperature above 0 and without a fixed seed",
    ),
    "groups_equal": (
        "groups whose rollouts all have the same return, or that of their baseline",
        "check that the reward tells good answers from bad ones, or choose tasks that sometimes succeed",
    ),
    "rollouts_unscored": (
        "unscored rollouts",
        "give each rollout a reward when it ends, or start reward workers; if single steps are trained, give each a "
        "reward, and start the pool with --require-reward, so that it waits for them",
    ),
    "rollouts_without_logprobs": (
        "rollouts without log-probabilities",
        "use an engine that returns them, send them with the steps, or, where the trainer can, set old_logprobs to "
        "recomputed or current",
    ),
    "rollouts_overlong": (
        "rollouts whose last step did not come to its end",
        "let agents answer longer (max_tokens, the engine's context), or set filter_overlong to False",
    ),
    "steps_other_temperature": (
        "steps sampled at another temperature than the trainer's",
        "set the trainer's temperature to that of the samples",
    ),
    "steps_unknown_temperature": (
        "steps whose temperature is not known",
        "send the temperature with the steps, or set the trainer's assumed_temperature",
    ),
    "steps_unusable_advantages": (
        "steps whose own advantages are not one number for each token",
        "send a list with a number for each token of the sequence, or none",
    ),
}
"""Texts by the field of LeftOut: what was left out, and what to do."""


class LearningMonitor:
    """Sees every batch (or group) that a trainer takes. `limit` is how many in a row may teach nothing."""

    def __init__(self, limit: int | None, unit: str = "batches") -> None:
        self._limit = limit
        self._unit = unit
        self._in_a_row = 0
        self._left_out: Counter[str] = Counter()
        """The counts since the last batch that taught something."""
        self._reported: set[str] = set()

    def check(self, rows: TrainedRows, version: int = NO_VERSION) -> None:
        """NothingLearned if this is one too many. `version` is that of the weights before the update, if it is
        known."""
        if not rows.is_new_T.any():
            return
        self._say_what_lacks(rows, version)
        counts = Counter({reason: count for reason, count in asdict(rows.left_out).items() if count})
        for reason in counts.keys() - self._reported:
            self._reported.add(reason)
            what, remedy = REASONS[reason]
            log.warning("%d %s are not trained; %s. This is said once and counted", counts[reason], what, remedy)
        if rows.tokens:
            self._in_a_row, self._left_out = 0, Counter()
            return
        self._in_a_row += 1
        self._left_out += counts
        if self._in_a_row == 1:
            log.warning("nothing can be learned from this data: %s", self._explanation())
        if self._limit is not None and self._in_a_row >= self._limit:
            raise NothingLearned(
                f"nothing could be learned from {self._in_a_row} {self._unit} in a row: {self._explanation()}"
            )

    def _say_what_lacks(self, rows: TrainedRows, version: int) -> None:
        """Says once how data that lacks log-probabilities or temperatures is trained all the same."""
        filled, lacks = rows.filled_in(version), dict[str, str]()
        if missing := filled.logprobs_recomputed + filled.logprobs_current:
            lacks["logprobs"] = (
                f"{missing} of {rows.tokens} trained tokens have no recorded log-probability: "
                f"{filled.logprobs_recomputed} have that of the weights that sampled them, and "
                f"{filled.logprobs_current} that of the current weights, which are {filled.logprobs_staleness:.1f} "
                "versions newer on average (old_logprobs)"
            )
        if filled.temperatures_assumed:
            lacks["temperatures"] = (
                f"{filled.temperatures_assumed} steps do not tell their temperature and are taken for sampled at the "
                "assumed one (assumed_temperature)"
            )
        if said := [text for kind, text in lacks.items() if kind not in self._reported]:
            self._reported |= lacks.keys()
            log.warning("not all is known of this data: %s. This is said once and counted", "; ".join(said))

    def _explanation(self) -> str:
        """The reasons, the most frequent first, and what to do about that one."""
        ordered = [(REASONS[reason], count) for reason, count in self._left_out.most_common()]
        if not ordered:
            return "no token is marked to be trained"
        return "; ".join(f"{count} {what}" for (what, _), count in ordered) + f". To do: {ordered[0][0][1]}"
