"""What would be handed out next. It chooses as a fetch does, and changes nothing."""

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import NamedTuple

from stepwell.pool.api.leasing import (
    LATER,
    PREVIEWED,
    WAITING,
    BatchRequest,
    ExactFill,
    Order,
    PreviewItem,
    ReadySummary,
    ShardPreview,
    Unit,
)
from stepwell.pool.api.staleness import oldest_version, versions_behind
from stepwell.pool.api.transport import UNSEEN
from stepwell.pool.rules.batch_selection import LEFT_OUT, STALE, BatchSelection, reading
from stepwell.pool.rules.leasing import Leasing
from stepwell.pool.state.channel_index import Channel
from stepwell.pool.state.pool_state import PoolState
from stepwell.pool.state.records import Group, Trajectory
from stepwell.pool.state.stored_step import StoredStep
from stepwell.steps.trainable import StepFilter

UNASKED = 8
"""The size of the batch that is shown while no consumer has asked for one."""


class GroupShare(NamedTuple):
    """What a consumer would get of a group."""

    group: Group
    trajectories: Collection[Trajectory]
    opened_at: float
    step: StoredStep | None = None
    """The only step, if steps are handed out."""


class Previewer:
    def __init__(self, state: PoolState, leasing: Leasing) -> None:
        self._state = state
        self._leasing = leasing
        self._selection = BatchSelection(state, drops=False)

    def last_request(self, name: str) -> tuple[float, BatchRequest | ExactFill]:
        """When a consumer asked for a batch of that channel last, and for which; 0 if none has since the start."""
        channel = self._state.channels.get(name)
        unit = Unit.GROUPS if channel is None or channel.unit is None else channel.unit
        unasked = 0.0, BatchRequest(count=UNASKED, channel=name, unit=unit)
        at, asked = self._leasing.last_requests.get(name, unasked)
        if isinstance(asked, ExactFill):
            return at, asked
        return at, replace(asked, count=asked.batch or asked.count, batch=0, max_per_user=None, user_rooms={})

    def preview(self, request: BatchRequest | ExactFill, asked_at: float, nothing_after: float) -> ShardPreview:
        channel, step_filter = self._state.channels.get(request.channel), self._leasing.filter_of(request)
        shares = [] if channel is None else self._chosen(channel, request, step_filter)
        fresh = [share for share in shares if not share.group.trained]
        described = shares if isinstance(request, ExactFill) else shares[:PREVIEWED]
        return ShardPreview(
            request=request,
            asked_at=asked_at,
            count=len(shares),
            items=[self._item(share, step_filter) for share in described],
            ready=ReadySummary(
                UNSEEN, [share.opened_at for share in fresh], nothing_after, tuple(share.group.user for share in fresh)
            ),
            waiting=[] if channel is None else self._waiting(channel, request, step_filter, shares),
        )

    def _chosen(self, channel: Channel, request: BatchRequest | ExactFill, step_filter: StepFilter) -> list[GroupShare]:
        select = self._selection
        if isinstance(request, ExactFill):
            offered = select.offered(channel, request.trajectories, step_filter)
            return [GroupShare(group, group.trajectories.values(), group.opened_at) for group, _ in offered]
        request = replace(request, models=step_filter.models)
        history, limit = select.history(channel, request, self._leasing.user_limit(request))
        repeated = [GroupShare(group, group.trajectories.values(), group.opened_at) for group in history]
        if request.unit is Unit.STEPS:
            steps = select.steps(channel, request, limit)
            return [GroupShare(found.group, [found], step.started_at, step) for found, step in steps]
        count = request.count - len(history)
        if request.unit is Unit.TRAJECTORIES:
            trajectories = select.trajectories(channel, request, count, limit)
            return [GroupShare(found.group, [found], found.group.opened_at) for found in trajectories]
        groups = select.groups(channel, request, count, limit)
        return [*(GroupShare(group, select.rest_of(group), group.opened_at) for group in groups), *repeated]

    def _item(self, share: GroupShare, step_filter: StepFilter | None, why: str = "") -> PreviewItem:
        """Without a filter, of all that is held."""
        group = share.group
        with reading(share.trajectories):
            steps_of = {
                trajectory: [
                    step
                    for step in ([share.step] if share.step is not None else trajectory.held_steps())
                    if step_filter is None or step_filter.accepts(step)
                ]
                for trajectory in share.trajectories
            }
            shown = [found for found, steps in steps_of.items() if steps or step_filter is None]
            oldest = oldest_version(step for found in shown for step in steps_of[found])
            return PreviewItem(
                prompt_uid=group.prompt_uid,
                group=group.seq,
                age=group.age,
                opened_at=share.opened_at,
                source=group.source,
                user=group.user,
                size=group.size,
                trajectories=tuple(found.uid for found in shown),
                rewards=tuple(found.total_return() for found in shown),
                steps=sum(len(steps_of[found]) for found in shown),
                oldest_version=oldest,
                behind=0 if oldest is None else versions_behind(oldest, self._state.serving.version_of(group.channel)),
                from_history=group.trained,
                why=why,
            )

    def _waiting(
        self, channel: Channel, request: BatchRequest | ExactFill, step_filter: StepFilter, shares: Sequence[GroupShare]
    ) -> list[PreviewItem]:
        """The oldest groups of which nothing is in the batch."""
        chosen = {share.group.seq for share in shares}
        oldest = (channel.groups[seq] for _, seq in channel.by_age.smallest(WAITING + len(chosen)))
        waiting = [group for group in oldest if group.seq not in chosen and group.trajectories][:WAITING]
        return [
            self._item(
                GroupShare(group, group.trajectories.values(), group.opened_at),
                None,
                self._why_waiting(channel, group, request, step_filter, shares),
            )
            for group in waiting
        ]

    def _why_waiting(
        self,
        channel: Channel,
        group: Group,
        request: BatchRequest | ExactFill,
        step_filter: StepFilter,
        shares: Sequence[GroupShare],
    ) -> str:
        why = self._why(channel, group, step_filter) or self._why_later(group, request, shares)
        kept = self._state.why_kept(group)
        return f"{why}; it is neither evicted nor stale: {kept}" if kept else why

    def _why(self, channel: Channel, group: Group, step_filter: StepFilter) -> str:
        what_happens = self._selection.why_not(channel, group, step_filter)
        if what_happens == STALE:
            return f"too old (max_staleness {self._state.limits.max_staleness}): the next fetch drops it"
        if not channel.is_ready(group):
            return self._unfinished(group)
        if what_happens == LEFT_OUT:
            with reading(group.trajectories.values()):
                kinds = {step_filter.rejection_kind(step) for step in group.held_steps()} - {None}
            what = ", ".join(sorted(map(str, kinds)))
            return f"the trainer wants none of its steps ({what}): the next fetch leaves it out"
        return "a version of the policy said it that was rolled back: the next fetch drops it" if what_happens else ""

    def _why_later(self, group: Group, request: BatchRequest | ExactFill, shares: Sequence[GroupShare]) -> str:
        if isinstance(request, ExactFill):
            return LATER
        limit = self._leasing.user_limit(request)
        of_user = sum(share.group.user == group.user for share in shares)
        if limit is not None and group.user and of_user >= limit.room(group.user):
            return "the batch has as much of its user as --max-share-per-user allows"
        if request.order is Order.STRICT and len(shares) < request.count:
            return "in strict order it waits for an older group"
        return LATER

    def _unfinished(self, group: Group) -> str:
        started, completed = len(group.trajectories), group.completed
        parts = [f"{completed} of {group.size} rollouts are complete"]
        if started > completed:
            parts.append(f"{started - completed} running")
        if started < group.size:
            parts.append(f"{group.size - started} not started")
        with reading(group.trajectories.values()):
            unscored = sum(found.completed and not found.has_its_rewards() for found in group.trajectories.values())
        if unscored and self._state.limits.require_reward:
            parts.append(f"{unscored} without a reward")
        return ", ".join(parts)
