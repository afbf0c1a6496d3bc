"""What this gateway still lacks, said in one line each: by /ready, and in the log whenever it changes."""

import asyncio
import logging

from stepwell.common.tokenizers import BackgroundTokenizer
from stepwell.engines.fleet import EngineFleet
from stepwell.engines.replica import EngineState
from stepwell.errors import StepwellError
from stepwell.pool.api.ports import RewardScorer, StepSink

log = logging.getLogger("stepwell.gateway")

PAUSE = 1.0


class ReadinessCheck:
    def __init__(
        self, pool: StepSink, engines: EngineFleet, tokenizer: BackgroundTokenizer, rewards: RewardScorer | None
    ) -> None:
        self._pool = pool
        self._engines = engines
        self._tokenizer = tokenizer
        self._rewards = rewards

    async def missing(self) -> dict[str, str]:
        """By part: tokenizer, data_pool, engines, reward_worker. Empty means ready."""
        parts = {
            "tokenizer": self._tokenizer.why_not_ready(),
            "data_pool": await _why(self._pool),
            "engines": self._why_no_engine(),
            "reward_worker": None if self._rewards is None else await _why(self._rewards),
        }
        return {part: why for part, why in parts.items() if why is not None}

    async def announce(self) -> None:
        """Log what is missing, each line once, until nothing is."""
        said: dict[str, str] = {}
        while missing := await self.missing():
            for part, why in missing.items():
                if said.get(part) != why:
                    log.warning("waiting for %s: %s", part, why)
            said = missing
            await asyncio.sleep(PAUSE)
        log.info("ready")

    def _why_no_engine(self) -> str | None:
        """A paused engine is there: a call to it waits."""
        states = self._engines.states()
        if any(engine.state is not EngineState.DOWN for engine in states):
            return None
        return "; ".join(f"{engine.address}: {engine.why}" for engine in states) or "there is none"


async def _why(part: StepSink | RewardScorer) -> str | None:
    try:
        await part.check()
    except StepwellError as failure:
        return str(failure)
    return None
