"""New adapters for engines that keep serving.

- An adapter has its channel, its version and a digest of its weights in its name, so a name never stands for other
  weights, and calls in progress end with the adapter they began with. Nothing is paused, and no other channel notices.
- The pool gets the name when every engine that answers has it.
- An engine that joins or restarts gets the newest adapters in the background. Until then, gateways answer the
  channel's calls to it with an error that can be retried.
"""

import hashlib
import io
import logging
import re
import shutil
import tarfile
import threading
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from stepwell.common.files import rename_folder
from stepwell.engines import ENGINES
from stepwell.engines.engine import EngineControl
from stepwell.errors import BadRequest, EngineSilent, SyncFailed
from stepwell.pool.client import DataPool
from stepwell.trainers.weight_sync import keep_calling

log = logging.getLogger("stepwell.trainers")

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
CATCH_UP_INTERVAL = 1.0
"""Seconds between two looks for engines that lack an adapter."""


class AdapterSync:
    """Brings the adapters of one channel to all engines of the list that `pool` holds, and to `engines`.

    `folder` is where adapters are unpacked; the engines must see it under the same path. The newest `kept` stay loaded:
    calls in progress may use older ones than the newest. Of two channels, each has an AdapterSync.
    """

    def __init__(
        self,
        pool: DataPool,
        channel: str,
        folder: Path,
        *,
        engines: Sequence[str] = (),
        kept: int = 2,
        engine_key: str | None = None,
        timeout: float = 60.0,
        engine_kind: str = "vllm",
        background: bool = True,
    ) -> None:
        if not re.fullmatch(r"[\w.-]+", channel):
            raise BadRequest(f"channel {channel!r} cannot be part of an adapter's name: use letters, digits, . _ and -")
        kinds = {kind.name: kind for kind in ENGINES}
        if engine_kind not in kinds:
            raise BadRequest(f"no engine kind is called {engine_kind!r}; there are: {', '.join(kinds)}")
        self.channel = channel
        self._control = partial(kinds[engine_kind].control, key=engine_key, timeout=timeout)
        self._given = tuple(engines)
        self._pool = pool
        self._folder = folder.absolute()
        self._kept = kept
        self._name = re.compile(rf"{re.escape(channel)}-v(\d+)-[0-9a-f]{{8}}")
        self._newest: list[str] = []
        """The names of the adapters that the engines have to have, the newest last."""
        self._one_at_a_time = threading.Lock()
        self._background = background
        self._catching_up: threading.Thread | None = None

    def publish(self, archive: bytes, version: int) -> str:
        """The adapter's name. Returns once the engines have it and the channel's calls go to it.

        An engine that does not answer gets it later; SyncFailed if one refuses it, or if none answers.
        """
        with self._one_at_a_time:
            name = self._unpack(archive, version)
            self._newest = [*(other for other in self._newest if other != name), name][-self._kept :]
            answered = [engine for engine in self._engines() if self._has_loaded(engine, [name])]
            if not answered:
                raise SyncFailed(f"no engine answers: the adapter {name} is served by none")
            self._pool.set_adapter(self.channel, name, version)
            for engine in answered:
                self._unload_old(engine)
            self._delete_old()
        if self._background and self._catching_up is None:
            self._catching_up = keep_calling(
                self.catch_up, CATCH_UP_INTERVAL, task="engines could not be given their adapters"
            )
        return name

    def catch_up(self) -> list[str]:
        """Loads the newest adapters at engines that lack one, and returns the addresses of these."""
        with self._one_at_a_time:
            behind = []
            for engine in self._engines():
                try:
                    lacking = set(self._newest) - set(engine.adapters())
                except EngineSilent:
                    continue
                if lacking and self._has_loaded(engine, self._newest):
                    log.info("engine %s was given %s", engine.url, ", ".join(sorted(lacking)))
                    behind.append(engine.url)
            return behind

    def _engines(self) -> list[EngineControl]:
        return [self._control(url) for url in dict.fromkeys((*self._pool.engines(), *self._given))]

    def _has_loaded(self, engine: EngineControl, names: Sequence[str]) -> bool:
        """False if the engine does not answer: it gets no calls then."""
        try:
            for name in names:
                engine.load_adapter(name, self._folder / name)
        except EngineSilent as silent:
            log.warning("engine %s gets its adapters when it is back: %s", engine.url, silent)
            return False
        return True

    def _unpack(self, archive: bytes, version: int) -> str:
        name = f"{self.channel}-v{version}-{hashlib.sha256(_weights_of(archive)).hexdigest()[:8]}"
        place = self._folder / name
        if not (place / WEIGHTS).exists():
            unfinished = place.with_suffix(".part")
            shutil.rmtree(unfinished, ignore_errors=True)
            shutil.rmtree(place, ignore_errors=True)
            with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
                for member in _wanted(tar):
                    member.name = Path(member.name).name
                    tar.extract(member, unfinished, filter="data")
            rename_folder(unfinished, place)
        return name

    def _is_old(self, name: str) -> bool:
        return self._name.fullmatch(name) is not None and name not in self._newest

    def _unload_old(self, engine: EngineControl) -> None:
        """Unloads adapters that are not used any more, also those of a run before. Calls in progress with them end as
        they began."""
        try:
            for name in filter(self._is_old, engine.adapters()):
                engine.unload_adapter(name)
        except SyncFailed as failure:
            log.warning("engine %s keeps adapters that are not used any more: %s", engine.url, failure)

    def _delete_old(self) -> None:
        """Deletes all old adapters but the last ones that were unloaded: an engine may read an adapter again for a call
        in progress."""
        old = [place for place in self._folder.iterdir() if self._is_old(place.name)]
        for place in sorted(old, key=lambda found: found.stat().st_mtime)[: -self._kept]:
            shutil.rmtree(place, ignore_errors=True)


def _wanted(tar: tarfile.TarFile) -> list[tarfile.TarInfo]:
    return [found for found in tar.getmembers() if found.isfile() and Path(found.name).name in (WEIGHTS, CONFIG)]


def _weights_of(archive: bytes) -> bytes:
    """SyncFailed unless the archive is an adapter in PEFT's form."""
    try:
        with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
            files = {Path(member.name).name: tar.extractfile(member) for member in _wanted(tar)}
            weights = files[WEIGHTS]
            if CONFIG in files and weights is not None:
                return weights.read()
    except (tarfile.TarError, KeyError):
        pass
    raise SyncFailed(f"the service's archive is not a PEFT adapter: it needs {WEIGHTS} and {CONFIG}")
