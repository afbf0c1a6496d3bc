"""`stepwell export` and `stepwell import`."""

import asyncio

from stepwell.common.tokenizers import load_decode
from stepwell.config.exports import ExportSettings, ImportSettings
from stepwell.exports import commands
from stepwell.wiring.pool_access import join_pool
from stepwell.wiring.stdout import say


def run_export(settings: ExportSettings) -> None:
    pool = join_pool(settings) if settings.from_ is None else None
    decode = None if settings.tokenizer_path is None else load_decode(settings.tokenizer_path)
    asyncio.run(commands.run_export(settings, pool, decode, say))


def run_import(settings: ImportSettings) -> None:
    asyncio.run(commands.run_import(settings, join_pool(settings), say))
