"""What a person has agreed to: flags in the metadata of a trajectory, and how long its data is kept."""

from collections.abc import Mapping

from stepwell.steps.step import JsonObject

CONSENT = "consent"
"""In a trajectory's metadata: {train, keep}. A flag that is not there is true."""
RETENTION = "retention_seconds"
"""In a trajectory's metadata: how many seconds its data is kept, if that is less than the pool keeps data."""


def may_train(metadata: JsonObject) -> bool:
    """False: its steps are recorded, and no trainer gets them."""
    return _says(metadata, "train")


def may_keep(metadata: JsonObject) -> bool:
    """False: it is neither archived nor exported, and it leaves the pool as soon as it is trained."""
    return _says(metadata, "keep")


def _says(metadata: JsonObject, flag: str) -> bool:
    consent = metadata.get(CONSENT) if metadata else None
    return consent is None or not isinstance(consent, Mapping) or consent.get(flag) is not False
