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
