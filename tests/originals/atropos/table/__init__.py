"""The table: one row for each environment, in one file per family."""

from tests.originals.atropos.row import Row
from tests.originals.atropos.table import community, community_more, core, evaluation, games, multimodal

TABLE: tuple[Row, ...] = (
    *core.ROWS,
    *evaluation.ROWS,
    *games.ROWS,
    *multimodal.ROWS,
    *community.ROWS,
    *community_more.ROWS,
)
BY_FILE = {row.file: row for row in TABLE}

DO_NOT_START: dict[str, str] = {
    **core.DO_NOT_START,
    **evaluation.DO_NOT_START,
    **community_more.DO_NOT_START,
}
"""File → why it does not work with atroposlib itself, so that nothing is expected of Stepwell."""


def row_of(file: str) -> Row:
    return BY_FILE.get(file, Row(file=file))
