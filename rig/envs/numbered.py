"""An environment whose groups are numbered, each with a name of its own: what becomes of every group can be told."""

from uuid import uuid4

from stepwell.envs import BaseEnv, Item, ScoredDataGroup, ScoredDataItem
from stepwell.envs.scored_data import Groups


class Numbered(BaseEnv):
    name = "numbered"
    checkpoint_fields = ("begun",)

    async def setup(self) -> None:
        self.begun = 0

    async def get_next_item(self) -> Item:
        self.begun += 1
        return self.begun

    async def collect_trajectory(self, item: Item) -> tuple[ScoredDataItem | None, list[Item]]:
        messages = [{"role": "user", "content": f"Say number {item}."}]
        async with self.server.managed_server() as session:
            await session.chat_completion(messages=messages, max_tokens=8)
            (rollout,) = session.get_state()["nodes"]
        return rollout.item(float(rollout.tokens[-1] % 2), overrides={"number": item}), []

    async def postprocess_histories(self, trajectories: ScoredDataGroup) -> Groups:
        return {**trajectories, "group_overrides": {"name": uuid4().hex}}


if __name__ == "__main__":
    Numbered.cli()
