"""Which ready data a batch has, oldest first: a fetch takes it, a preview only shows it.

What comes up and is not eligible is left out, dropped or made smaller by a fetch. A preview passes over it and changes
nothing.

What a version of the policy said that was refused or rolled back is not trained. Its log-probabilities are recorded,
so a trainer could correct for them. But what a bad policy says is not worth learning. A step of it is dropped when its
turn comes. In a batch of groups or trajectories its whole trajectory is dropped, because the bad version has a part in
its outcome. The rest of a group remains.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from operator import attrgetter
from typing import TypeVar

from stepwell.pool.api.leasing import BatchRequest, UserLimit, max_per_user
from stepwell.pool.api.staleness import consequence_of
from stepwell.pool.state.channel_index import Channel
from stepwell.pool.state.pool_state import PoolState
from stepwell.pool.state.queues import K, ReadyQueue, SizeBucket
from stepwell.pool.state.records import Group, Trajectory
from stepwell.pool.state.stored_step import StoredStep
from stepwell.steps.trainable import StepFilter

T = TypeVar("T")

ROLLED_BACK = "rolled_back"
"""The cause under which steps of a withdrawn version are counted."""
STALE, LEFT_OUT, SMALLER = "stale", "left out", "smaller"
"""What happens to a group besides `rolled_back`. Smaller: some of its trajectories are rolled back."""
MOST_PASSED = 500
"""What a preview passes over at most, so that it is cheap."""
USER_OF_GROUP: Callable[[Group], str] = attrgetter("user")


class BatchSelection:
    def __init__(self, state: PoolState, *, drops: bool = True) -> None:
        """`drops` is False for a preview."""
        self._state = state
        self._drops = drops
        self._staleness = consequence_of(state.limits)

    # -- groups --------------------------------------------------------------------------------------------------------

    def groups(self, channel: Channel, request: BatchRequest, count: int, limit: UserLimit | None) -> list[Group]:
        """Fewer than `count` if there are fewer."""
        groups = self._eligible(
            lambda most, allowed: channel.oldest_groups(most, request.order, allowed),
            lambda group: self.refuse_group(channel, group, request.step_filter),
            USER_OF_GROUP,
            count,
            limit,
        )
        if limit is not None and len(groups) == count:
            self._count_deferred(channel.ready, [group.key for group in groups])
        return [group for group in groups if channel.is_ready(group)]

    def offered(self, channel: Channel, trajectories: int, step_filter: StepFilter) -> list[tuple[Group, int]]:
        """The groups that could be part of the oldest exact batch, whatever is queued, with their sizes."""
        groups = [
            group for bucket in channel.by_size for group in self._of_size(channel, bucket, trajectories, step_filter)
        ]
        sized = ((group, accepted_trajectories(group, step_filter)) for group in groups)
        return [(group, size) for group, size in sized if size <= trajectories]

    def history(
        self, channel: Channel, request: BatchRequest, limit: UserLimit | None
    ) -> tuple[list[Group], UserLimit | None]:
        """The trained groups of a batch, and what it may have of each user besides."""
        draw = channel.draw_history if self._drops else channel.foresee_history
        drawn = draw(round(request.count * request.history))
        groups = [group for group in drawn if self._is_worth_repeating(group, request.step_filter)]
        if limit is None:
            return groups, None
        groups = limit.keep(groups, USER_OF_GROUP)
        return groups, limit.less(map(USER_OF_GROUP, groups))

    def refuse_group(self, channel: Channel, group: Group, step_filter: StepFilter, *, whole: bool = False) -> bool:
        """Must the group not be handed out as it is? A fetch then leaves it out, drops it or makes it smaller. A
        preview shows what is left of a smaller one, unless it must be `whole`."""
        if not self._drops:
            return bool(self.why_not(channel, group, step_filter, whole=whole))
        why = self._why_not(channel, group, step_filter, group.trajectories.values())
        if why == LEFT_OUT:
            self._state.leave_out(group, step_filter)
        elif why == SMALLER:
            self._state.trim_group(group, self.rest_of(group), ROLLED_BACK, wait_until=None)
        elif why:
            note = self._staleness_note(group.channel, group.held_steps()) if why == STALE else ""
            self._state.drop_group(group, why, note)
        return bool(why)

    def why_not(self, channel: Channel, group: Group, step_filter: StepFilter, *, whole: bool = False) -> str:
        """What happens to a group instead of being handed out when its turn comes; empty if it is handed out, `whole`
        or what is left of it."""
        with reading(group.trajectories.values()):
            why = self._why_not(channel, group, step_filter, group.trajectories.values())
            is_rest_taken = why == SMALLER and not whole
            return self._why_not(channel, group, step_filter, self.rest_of(group)) if is_rest_taken else why

    def rest_of(self, group: Group) -> list[Trajectory]:
        """The trajectories that are not rolled back."""
        withdrawn = self._withdrawn(group.channel)
        if not withdrawn:
            return list(group.trajectories.values())
        with reading(group.trajectories.values()):
            return rest_of(group, withdrawn)

    def _of_size(self, channel: Channel, bucket: SizeBucket, trajectories: int, step_filter: StepFilter) -> list[Group]:
        """Returns as many groups of a bucket as a batch could use; more if the filter makes some of them smaller."""
        count, share = trajectories // bucket.size, self._state.limits.max_share_per_user
        limit = None if share is None else UserLimit(max(1, max_per_user(share, trajectories) // bucket.size))
        while True:
            groups = self._eligible(
                lambda most, allowed: [channel.groups[seq] for _, seq in bucket.oldest(most, allowed)],
                lambda group: self.refuse_group(channel, group, step_filter, whole=True),
                USER_OF_GROUP,
                count,
                limit,
            )
            sizes = [accepted_trajectories(group, step_filter) for group in groups]
            if all(size == bucket.size for size in sizes) or count == trajectories:
                return groups
            count = trajectories

    def _is_worth_repeating(self, trained: Group, step_filter: StepFilter) -> bool:
        with reading(trained.trajectories.values()):
            steps = list(trained.held_steps())
            return accepts_any(steps, step_filter) and not is_withdrawn(steps, self._withdrawn(trained.channel))

    def _why_not(
        self, channel: Channel, group: Group, step_filter: StepFilter, trajectories: Iterable[Trajectory]
    ) -> str:
        found = list(trajectories)
        steps = [step for trajectory in found for step in trajectory.held_steps()]
        if channel.is_ready(group):
            if not accepts_any(steps, step_filter):
                return LEFT_OUT
            withdrawn = self._withdrawn(group.channel)
            gone = sum(is_withdrawn(trajectory.held_steps(), withdrawn) for trajectory in found) if withdrawn else 0
            if gone:
                return SMALLER if gone < len(found) else ROLLED_BACK
        return STALE if self._is_stale(group, filter(step_filter.accepts, steps)) else ""

    # -- trajectories --------------------------------------------------------------------------------------------------

    def trajectories(
        self, channel: Channel, request: BatchRequest, count: int, limit: UserLimit | None
    ) -> list[Trajectory]:
        """Fewer than `count` if there are fewer."""
        chosen = self._eligible(
            lambda most, allowed: [
                self._state.trajectories[uid] for *_, uid in channel.ready_trajectories.oldest(most, allowed)
            ],
            lambda found: self._refuse_trajectory(found, request.step_filter),
            attrgetter("user"),
            count,
            limit,
        )
        if limit is not None and len(chosen) == count:
            self._count_deferred(channel.ready_trajectories, [found.key for found in chosen])
        return chosen

    def _refuse_trajectory(self, trajectory: Trajectory, step_filter: StepFilter) -> bool:
        with nullcontext() if self._drops else reading([trajectory]):
            why, note = self._why_not_single(trajectory, step_filter)
        if why == LEFT_OUT and self._drops:
            self._state.leave_out(self._state.split_off(trajectory), step_filter)
        elif why and self._drops:
            self._state.drop_trajectory(trajectory, why, note, frees_place=False)
        return bool(why)

    def _why_not_single(self, trajectory: Trajectory, step_filter: StepFilter) -> tuple[str, str]:
        """With a note."""
        channel, steps = trajectory.group.channel, trajectory.held_steps()
        if not accepts_any(steps, step_filter):
            return LEFT_OUT, ""
        if is_withdrawn(steps, self._withdrawn(channel)):
            return ROLLED_BACK, ""
        is_stale = self._is_stale(trajectory.group, filter(step_filter.accepts, steps))
        return (STALE, self._staleness_note(channel, steps)) if is_stale else ("", "")

    # -- steps ---------------------------------------------------------------------------------------------------------

    def steps(
        self, channel: Channel, request: BatchRequest, limit: UserLimit | None
    ) -> list[tuple[Trajectory, StoredStep]]:
        """Fewer than requested if there are fewer."""
        chosen = self._eligible(
            channel.oldest_steps,
            lambda found: self._refuse_step(*found, request.step_filter),
            lambda found: found[0].user,
            request.count,
            limit,
        )
        if limit is not None and len(chosen) == request.count:
            self._count_deferred(channel.ready_steps, [(step.number,) for _, step in chosen])
        return chosen

    def _refuse_step(self, trajectory: Trajectory, step: StoredStep, step_filter: StepFilter) -> bool:
        channel = trajectory.group.channel
        if not step_filter.accepts(step):
            if self._drops:
                self._state.ship_step(trajectory, step, step_filter)
            return True
        is_gone = is_withdrawn((step,), self._withdrawn(channel))
        if not is_gone and not self._is_stale(trajectory.group, (step,)):
            return False
        if self._drops:
            self._state.drop_step(trajectory, step, ROLLED_BACK if is_gone else STALE)
        return True

    # -- private -------------------------------------------------------------------------------------------------------

    def _eligible(
        self,
        oldest: Callable[[int, UserLimit | None], list[T]],
        refuse: Callable[[T], bool],
        user_of: Callable[[T], str],
        count: int,
        limit: UserLimit | None,
    ) -> list[T]:
        """The oldest that are not refused. A fetch finds no more what it has refused; a preview passes over it."""
        passed: dict[int, T] = {}
        while True:
            allowed = limit.more(map(user_of, passed.values())) if limit is not None and passed else limit
            found = [one for one in oldest(count + len(passed), allowed) if id(one) not in passed]
            refused = {id(one): one for one in found if refuse(one)}
            if not refused:
                return found
            if not self._drops:
                passed |= refused
                if len(passed) > MOST_PASSED:
                    return [one for one in found if id(one) not in refused]

    def _count_deferred(self, queue: ReadyQueue[K], chosen: Sequence[K]) -> None:
        """Counts the items that the batch would have without a limit and does not have."""
        deferred = set(queue.smallest(len(chosen))) - set(chosen)
        if deferred and self._drops:
            self._state.count_deferred(len(deferred))

    def _withdrawn(self, channel: str) -> tuple[int, ...]:
        return self._state.serving.withdrawn_of(channel)

    def _is_stale(self, group: Group, steps: Iterable[StoredStep]) -> bool:
        is_stale = self._staleness.is_stale(steps, self._state.present(group.channel))
        return is_stale and not self._state.why_kept(group)

    def _staleness_note(self, channel: str, steps: Iterable[StoredStep]) -> str:
        distance = self._staleness.distance
        return f"the oldest token was {distance.words(distance.of_oldest(steps, self._state.present(channel)) or 0)}"


@contextmanager
def reading(trajectories: Iterable[Trajectory]) -> Iterator[None]:
    """For readers, who change nothing: what is packed now is so afterwards."""
    with ExitStack() as stack:
        for trajectory in trajectories:
            stack.enter_context(trajectory.read_only())
        yield


def accepts_any(steps: Iterable[StoredStep], step_filter: StepFilter) -> bool:
    """Is there anything for this consumer?"""
    return any(map(step_filter.accepts, steps))


def accepted_trajectories(group: Group, step_filter: StepFilter) -> int:
    """How many of its trajectories have something for this consumer."""
    with reading(group.trajectories.values()):
        return sum([accepts_any(found.held_steps(), step_filter) for found in group.trajectories.values()])


def is_withdrawn(steps: Iterable[StoredStep], versions: Collection[int]) -> bool:
    """Did one of these versions say a token of these steps?"""
    return any(_said_by(step, versions) for step in steps) if versions else False


def rest_of(group: Group, versions: Collection[int]) -> list[Trajectory]:
    """The trajectories of which none of these versions said anything."""
    return [found for found in group.trajectories.values() if not is_withdrawn(found.held_steps(), versions)]


def _said_by(step: StoredStep, versions: Collection[int]) -> bool:
    if not step.version_spans:
        return step.policy_version in versions
    return any(span.version in versions for span in step.version_spans)
