"""The dashboard's keys: viewers read, curators decide, and the audit trail has the key."""

import json
from pathlib import Path

import httpx

from rig.dashboard import MadeUpPool, serve_dashboard
from rig.issued_keys import CONTROL, bearer
from stepwell.access.audit_log import AuditLog
from stepwell.access.caller import Role
from stepwell.access.key_file import KeyFile, create_key


async def test_a_decision_is_recorded_with_the_key_and_not_with_the_name_that_is_claimed(tmp_path: Path) -> None:
    path, pool = tmp_path / "keys.json", MadeUpPool(8)
    curator, issued = create_key(path, Role.CURATOR, name="ada")
    viewer, _ = create_key(path, Role.VIEWER)
    audit = AuditLog(tmp_path / "audit.jsonl")
    row = next(iter(pool.rows.values()))
    named = [{"trajectory_uid": row.trajectory_uid, "prompt_uid": row.prompt_uid}]
    body = {"action": "mark", "mark": "odd", "by": "somebody else", "trajectories": named}
    how = {"control_keys": [CONTROL], "issued": KeyFile(path, interval=0.0), "audit": audit}
    async with serve_dashboard(pool, **how) as url, httpx.AsyncClient(base_url=url) as client:
        refused = await client.post("/api/curate", json=body, headers=bearer(viewer))
        assert refused.status_code == 403
        assert "this is for curator and admin" in refused.json()["error"]["message"]
        assert pool.entries == []
        assert (await client.get("/api/me", headers=bearer(curator))).json() == {"id": issued.id, "role": "curator"}
        for without_name in (body, {name: value for name, value in body.items() if name != "by"}):
            answer = await client.post("/api/curate", json=without_name, headers=bearer(curator))
            assert answer.status_code == 200, answer.text
    audit.close()
    assert {entry.by for entry in pool.entries} == {issued.id}
    lines = [json.loads(line) for line in (tmp_path / "audit.jsonl").read_text().splitlines()]
    assert [(line["role"], line["status"]) for line in lines] == [("viewer", 403), ("curator", 200), ("curator", 200)]
