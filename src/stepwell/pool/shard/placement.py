"""Where the shards of a pool with journals run: on the nodes that have the journals, or anywhere if no node has them.

- A pool is new if there is no journal of it. Otherwise it has the shards that the journal of its first shard names, and
  each of them must have its journal. Other journals are of shards that have left the pool, and have no groups.
- With files and without a resource, a shard stays on its node: if the node is lost, the shard waits for it, and does
  not start elsewhere without its data. With a resource, the nodes that offer it are said to have the journals.
- With a database, a shard can run and restart on any node, or on any that offers the resource.
"""

from collections.abc import Mapping
from dataclasses import replace
from uuid import uuid4

from stepwell.errors import JournalRefused
from stepwell.pool.api.plan import FIRST_REVISION, Layout, PoolPlan
from stepwell.pool.shard.journal_store import JournalHeader


def place_shards(
    plan: PoolPlan, found: Mapping[str, Mapping[str, JournalHeader]], home: str, *, new_journals: bool = False
) -> tuple[PoolPlan, bool]:
    """The plan with the pool's uid, the shards that it has and their nodes, and whether all have a journal already.

    `found` has the journals by node. New journals are created on the node `home`, those that are missing too if
    `new_journals` says so.
    """
    known = {shard for journals in found.values() for shard in journals}
    if not known:
        return replace(plan, uid=uuid4().hex, nodes=(home,) * plan.shards), False
    plan = _with_found_layouts(plan, found)
    _check_complete(plan, known, new_journals)
    identities = [journal.identity for journals in found.values() for journal in journals.values() if journal.identity]
    uids = {identity.pool_uid for identity in identities}
    if len(uids) > 1:
        where = "; ".join(f"{node}: {', '.join(journals)}" for node, journals in found.items() if journals)
        raise JournalRefused(
            f"the journals of pool {plan.name!r} in {plan.journal_name} are those of {len(uids)} pools ({where}); "
            "leave those of one, or use another --journal"
        )
    nodes = tuple(_newest(shard, found, home) for shard in plan.shard_names())
    return replace(plan, uid=uids.pop() if uids else uuid4().hex, nodes=nodes), not new_journals


def _with_found_layouts(plan: PoolPlan, found: Mapping[str, Mapping[str, JournalHeader]]) -> PoolPlan:
    """A pool keeps its number of shards until it is changed while the pool runs."""
    copies = [journals[plan.name] for journals in found.values() if plan.name in journals]
    others = [journal for journals in found.values() for journal in journals.values()]
    journal = max(copies, key=lambda copy: copy.epoch) if copies else others[0]
    if journal.layouts:
        return plan.with_layouts(journal.layouts)
    if journal.identity is not None:
        return plan.with_layouts([Layout(FIRST_REVISION, journal.identity.shards)])
    names = {name for journals in found.values() for name in journals}
    if names - set(plan.shard_names()):
        raise JournalRefused(
            f"the journals in {plan.journal_name} are of a pool of {len(names)} shards, and this one is to have "
            f"{plan.shards}. Use --shards {len(names)} first; the number can be changed while the pool runs"
        )
    return plan


def _check_complete(plan: PoolPlan, known: set[str], new_journals: bool) -> None:
    names = plan.shard_names()
    missing = [shard for shard in names if shard not in known]
    if missing and not new_journals:
        raise JournalRefused(
            f"in {plan.journal_name} there are journals of {len(names) - len(missing)} of {len(names)} shards; "
            f"missing: {', '.join(missing)}. Mount their volume, or put a backup there. To create them empty and give "
            "up what they held, use --new-journals"
        )


def _newest(shard: str, found: Mapping[str, Mapping[str, JournalHeader]], home: str) -> str:
    """The node with the shard's journal; of several copies, the one that was opened last, at home if they are equal."""
    copies = [(journals[shard].epoch, node == home, node) for node, journals in found.items() if shard in journals]
    return max(copies)[2] if copies else home
