"""A game of several agents: each says a word that begins with the last letter of the previous word.

    python examples/envs/word_game.py process --groups 4 --openai.model-name MODEL

One model plays all of them. Each has its own conversation, which becomes a sequence with its own score. The
sequences of one seat, over all games with the same first word, form a group.
"""

import asyncio
import random
import re
from contextlib import AsyncExitStack

from stepwell.envs import APIServerConfig, BaseEnv, BaseEnvConfig, Item, ScoredDataGroup, ScoredDataItem, gather
from stepwell.envs.servers import ManagedServer

FIRST_WORDS = ("apple", "river", "stone", "eagle", "table", "night", "garden", "orange", "winter", "yellow")
RULES = """You are player {seat} of {players}. In turn, each says one English word that begins with the last letter
of the word before and was not said yet. Answer with the word alone."""


class WordGameConfig(BaseEnvConfig):
    players: int = 2
    """Number of players."""
    rounds: int = 3
    """Words that each of them has to find."""


class WordGame(BaseEnv):
    """Word chains: a player's score is the share of its words that keep the rules."""

    name = "word_game"
    env_config_cls = WordGameConfig
    config: WordGameConfig

    @classmethod
    def config_init(cls) -> tuple[WordGameConfig, list[APIServerConfig]]:
        return WordGameConfig(group_size=8, max_token_length=2048), [APIServerConfig()]

    async def get_next_item(self) -> Item:
        return random.choice(FIRST_WORDS)

    async def collect_trajectories(self, item: Item) -> tuple[list[ScoredDataGroup], list[Item]]:
        games = await asyncio.gather(*(self.play(item) for _ in range(self.config.group_size)))
        return [gather(rollouts_of_seat) for rollouts_of_seat in zip(*games, strict=True)], []

    async def play(self, first_word: str) -> list[ScoredDataItem]:
        """One game: a rollout for each seat."""
        said = [first_word]
        async with AsyncExitStack() as sessions:
            players = [
                Player(seat, self.config, await sessions.enter_async_context(self.server.managed_server()))
                for seat in range(self.config.players)
            ]
            for _ in range(self.config.rounds):
                for player in players:
                    await player.move(said)
            return [player.rollout() for player in players]


class Player:
    def __init__(self, seat: int, config: WordGameConfig, session: ManagedServer) -> None:
        self.rounds, self.session, self.heard, self.good = config.rounds, session, 0, 0
        self.messages = [{"role": "system", "content": RULES.format(seat=seat + 1, players=config.players)}]

    async def move(self, said: list[str]) -> None:
        """Say a word. One that breaks the rules is not added to those that were said, and earns nothing."""
        news = ", ".join(said[self.heard :]) or "none"
        self.messages.append({"role": "user", "content": f"New words: {news}. Yours begins with {said[-1][-1]}."})
        reply = await self.session.chat_completion(messages=self.messages, max_tokens=16, temperature=1.0)
        text = reply.choices[0].message.content or ""
        self.messages.append({"role": "assistant", "content": text})
        word = text.strip().lower().rstrip(".")
        if re.fullmatch(r"[a-z]{2,}", word) and word[0] == said[-1][-1] and word not in said:
            said.append(word)
            self.good += 1
        self.heard = len(said)

    def rollout(self) -> ScoredDataItem:
        *_, conversation = self.session.get_state()["nodes"]
        item: ScoredDataItem = conversation.item(self.good / self.rounds, messages=self.messages)
        return item


if __name__ == "__main__":
    WordGame.cli()
