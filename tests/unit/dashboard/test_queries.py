import asyncio
import threading
from collections.abc import ItemsView

from stepwell.dashboard.follower import ConversationTexts, IndexedText

from rig.dashboard import MadeUpPool
from rig.made_up_rollouts import RigTokenizer
from rig.waiting import until
from stepwell.dashboard.gateway_monitor import GatewayMonitor
from stepwell.dashboard.index import Search, TrajectoryKey
from stepwell.dashboard.queries import DashboardQueries, DashboardState
from stepwell.pool.api.plan import PoolPlan
from tests.unit.dashboard.summaries import make_summary, told


class SlowTexts(ConversationTexts):
    """Searches in it go no further until they may."""

    def __init__(self) -> None:
        super().__init__()
        self.begun = 0
        self.may_go_on = threading.Event()

    def copy(self) -> dict[TrajectoryKey, IndexedText]:
        return SlowSnapshot(self, super().copy())


class SlowSnapshot(dict[TrajectoryKey, IndexedText]):
    def __init__(self, texts: SlowTexts, kept: dict[TrajectoryKey, IndexedText]) -> None:
        super().__init__(kept)
        self._texts = texts

    def items(self) -> ItemsView[TrajectoryKey, IndexedText]:  # type: ignore[override]
        self._texts.begun += 1
        assert self._texts.may_go_on.wait(20)
        return super().items()


async def test_a_search_of_texts_holds_up_no_one_and_another_waits_for_its_end() -> None:
    state = DashboardState(MadeUpPool(0), PoolPlan(), GatewayMonitor([], None), RigTokenizer())
    state.texts = texts = SlowTexts()
    queries = DashboardQueries(state)
    state.index.apply(told(row := make_summary("a")))
    texts.put(row, "Hello")
    searches = [asyncio.create_task(queries.find(Search(text=text))) for text in ("hello", "moon")]
    await until(lambda: texts.begun == 1, "the search to begin")
    assert (await queries.find(Search())).matched == 1, "answered meanwhile"
    texts.put(make_summary("b"), "hello too")
    assert texts.begun == 1
    texts.may_go_on.set()
    assert [found.matched for found in await asyncio.gather(*searches)] == [1, 0]
