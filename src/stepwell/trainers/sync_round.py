"""The engines of one weight sync, each brought through the same stages.

- An engine that fails at a stage is left out of the rest. The others go on.
- Before its weights change, an engine gets a version that begins with CHANGING, and a new number only afterwards. So no
  engine serves new weights under an old version, even if this process dies meanwhile.
- An engine that failed with changed weights stays paused, and the calls that it held are broken off: the gateways
  continue them on other engines.
"""

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

from stepwell.engines.engine import CHANGING, EngineControl, changing_from
from stepwell.errors import EngineSilent, SyncFailed

log = logging.getLogger("stepwell.trainers")


class SyncRound:
    def __init__(self, engines: Sequence[EngineControl]) -> None:
        self.engines = list(engines)
        """The engines that have not failed."""
        self.failed: dict[str, SyncFailed] = {}
        """The failures, by the engine's address."""

    def each(
        self, call: Callable[[EngineControl], object], undo: Callable[[EngineControl], object] = lambda _: None
    ) -> None:
        """Calls all engines at once. One that fails is left out, and undone unless it does not answer."""
        with ThreadPoolExecutor(max(1, len(self.engines))) as threads:
            calls = [(engine, threads.submit(call, engine)) for engine in self.engines]
        for engine, done in calls:
            if (failure := done.exception()) is None:
                continue
            if not isinstance(failure, SyncFailed):
                raise failure
            self.leave_out(engine, failure, undo)

    def leave_out(self, engine: EngineControl, failure: SyncFailed, undo: Callable[[EngineControl], object]) -> None:
        self.engines.remove(engine)
        self.failed[engine.url] = failure
        log.error("engine %s is left out of the weight sync: %s", engine.url, failure)
        if not isinstance(failure, EngineSilent):
            with suppress(SyncFailed):
                undo(engine)

    def require_one(self) -> None:
        if not self.engines:
            raise SyncFailed("; ".join(map(str, self.failed.values())) or "there is no engine")

    def pause(self) -> None:
        """Pauses the engines; one that fails here has its old weights and its old version."""
        self.each(lambda engine: engine.pause(), undo=lambda engine: engine.resume())
        self.each(_label_as_changing, undo=lambda engine: engine.resume())

    def resume(self, version: int) -> None:
        """Resumes engines with changed weights. These are not proved yet, but only an engine that computes can be asked
        for a proof."""
        self.each(lambda engine: engine.drop_prefixes(), undo=break_off)
        self.each(lambda engine: engine.set_version(str(version)), undo=_disown)
        self.each(_resume)

    def prove(self, check: Callable[[EngineControl], object]) -> None:
        self.each(check, undo=_disown)


def break_off(engine: EngineControl) -> None:
    """Ends the calls that a paused engine holds. It has sampled nothing since its weights changed."""
    engine.abort()


def _label_as_changing(engine: EngineControl) -> None:
    engine.set_version(changing_from(engine.version()))


def _disown(engine: EngineControl) -> None:
    """Takes the version from an engine that may have sampled with weights that nobody knows."""
    with suppress(SyncFailed):
        engine.set_version(CHANGING)
    engine.abort()


def _resume(engine: EngineControl) -> None:
    try:
        engine.resume()
    except SyncFailed as failure:
        raise type(failure)(f"an engine may still be paused; POST /resume there: {failure}") from None
