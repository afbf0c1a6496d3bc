"""docs/operations/security.md has the table of routes as the code has it."""

from collections.abc import Iterator

from rig.docs_pages import DOCS
from stepwell.access.caller import Role
from stepwell.access.route_table import ATROPOS_ROUTES, DASHBOARD_ROUTES, TRAJECTORY_ROOT, Route, gateway_routes

PAGE = (DOCS / "operations" / "security.md").read_text()
MODEL_CALL = "MODEL_CALL"
HEAD = "| server | call | roles | in the audit log |\n|---|---|---|---|\n"


def rows() -> Iterator[str]:
    tables = {"gateway": gateway_routes([MODEL_CALL]), "Atropos": ATROPOS_ROUTES, "dashboard": DASHBOARD_ROUTES}
    for server, table in tables.items():
        for route in table:
            if not is_another_spelling(route):
                roles = "everyone" if route.is_open else ", ".join(f"`{role}`" for role in sorted(route.roles)) or "–"
                recorded = "yes" if route.is_recorded else ""
                yield f"| {server} | `{route.method} {route.path}` | {roles} | {recorded} |\n"


def is_another_spelling(route: Route) -> bool:
    """Of a path that has /v1 once; /session/v1 is another name of /v1."""
    is_below = route.path.startswith((TRAJECTORY_ROOT, "/v1/", "/unrecorded/"))
    return route.path.startswith("/session/") or (is_below and route.path.split("/").count("v1") != 1)


def test_the_page_has_every_row_of_the_table_and_no_other() -> None:
    table = PAGE.partition(HEAD)[2].partition("\n\n")[0] + "\n"
    assert table == "".join(rows())


def test_the_page_has_every_role() -> None:
    listed = PAGE.partition("| role | may |\n|---|---|\n")[2].partition("\n\n")[0].splitlines()
    assert [line.split("`")[1] for line in listed] == list(Role)
