"""The settings of `stepwell doctor`."""

from pydantic import Field, field_validator
from pydantic_settings import SettingsConfigDict

from stepwell.config.sections import Section


class DoctorSettings(Section):
    """Examine an engine, its model and this machine: what works, what does not and why, and whether every token that
    a gateway would record is exact. Changes nothing; the engine is asked some thirty short things.

    Ends with status 0 if no fault was found, else with 1.
    """

    model_config = SettingsConfigDict(env_prefix="STEPWELL_DOCTOR_")

    engine: str
    """Address of the vLLM server, http://host:port."""
    tokenizer_path: str | None = None
    """Folder or name of the Hugging Face tokenizer, to spell tokens and compare the chat template with; without it, the
    engine is asked what its tokens spell."""
    key: str | None = None
    """Key that the engine asks for. Better given by STEPWELL_DOCTOR_KEY than on the command line, where others can read
    it."""
    ray_address: str | None = None
    """Ray's address, host:port; without it, the cluster on this machine is examined, if there is one."""
    as_json: bool = Field(default=False, alias="json")
    """Print the findings as JSON."""

    @field_validator("engine")
    @classmethod
    def _is_address(cls, value: str) -> str:
        if not value.startswith(("http://", "https://")):
            raise ValueError(f"{value!r} is no address; write http://host:port")
        return value.rstrip("/").removesuffix("/v1")
