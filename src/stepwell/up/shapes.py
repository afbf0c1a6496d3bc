"""The dashboard's /api/status, as far as `stepwell status` shows it. What else it says is passed over."""

from pydantic import BaseModel


class Amount(BaseModel):
    steps: int = 0
    tokens: int = 0


class Scoring(BaseModel):
    waiting: int = 0
    under_way: int = 0
    resting: int = 0
    scored: int = 0
    failed: dict[str, int] = {}
    late: int = 0


class Pool(BaseModel):
    name: str | None = None
    shards: int | None = None
    journal: str | None = None
    archive: str | None = None
    policy_version: int | None = None
    submitted: int | None = None
    leases: int | None = None
    refused: dict[str, int] | None = None
    quarantined: dict[str, int] | None = None
    scoring: Scoring | None = None


class Channel(BaseModel):
    name: str
    groups: int = 0
    ready_groups: int = 0
    trajectories: int = 0
    held: Amount = Amount()
    accepted: Amount = Amount()
    shipped: Amount = Amount()
    dropped: dict[str, Amount] = {}
    left_out: dict[str, Amount] = {}
    oldest_age: float = 0.0


class Gateway(BaseModel):
    url: str
    ready: bool = False
    missing: list[str] = []
    in_flight: int | None = None
    waiting_steps: int | None = None
    calls: int | None = None
    p50: float | None = None
    p95: float | None = None
    lost: dict[str, int] = {}
    error: str | None = None


class Engine(BaseModel):
    address: str
    state: str = ""
    why: str | None = None
    in_flight: int | None = None
    weight_version: str | int | None = None
    server: str | None = None


class Status(BaseModel):
    now: float = 0.0
    version: str = ""
    pool: Pool | None = None
    channels: list[Channel] = []
    gateways: list[Gateway] = []
    engines: list[Engine] = []
    pool_error: str | None = None
