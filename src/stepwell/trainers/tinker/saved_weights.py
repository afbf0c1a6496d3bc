"""What a service has saved, by the path that it told: `tinker://RUN/KIND/NAME`.

SkyRL tells `tinker://RUN/NAME` for sampler weights, and its archive goes by the bare name. Its deletion wants the kind.
"""

import logging
import urllib.request

from stepwell.errors import SyncFailed
from stepwell.trainers.tinker.service_ports import StoredWeights

log = logging.getLogger("stepwell.trainers")

MOST_BYTES = 2**34
"""Of an adapter's archive."""


def download(service: StoredWeights, path: str, *, timeout: float = 600.0) -> bytes:
    """The archive of weights that the service has saved for sampling."""
    run, name = _parts(path)
    url = service.get_checkpoint_archive_url(run, name).result().url
    if not str(url).startswith(("http://", "https://")):
        raise SyncFailed(f"the service stores {path} under an address that is not http: {url}")
    with urllib.request.urlopen(url, timeout=timeout) as reply:
        archive: bytes = reply.read(MOST_BYTES + 1)
    if len(archive) > MOST_BYTES:
        raise SyncFailed(f"the archive of {path} has more than {MOST_BYTES} bytes")
    return archive


def delete(service: StoredWeights, path: str) -> None:
    """If the service cannot, it only keeps more than is needed."""
    run, name = _parts(path)
    try:
        service.delete_checkpoint(run, name if "/" in name else f"sampler_weights/{name}").result()
    except Exception as failure:  # noqa: BLE001 - whatever a service answers
        log.info("the service keeps %s: %s", path, failure)


def _parts(path: str) -> tuple[str, str]:
    """The run, and how the service calls what is saved of it."""
    run, _, name = path.removeprefix("tinker://").partition("/")
    if not run or not name:
        raise SyncFailed(f"the service has saved weights under a path that is not tinker://RUN/NAME: {path}")
    return run, name
