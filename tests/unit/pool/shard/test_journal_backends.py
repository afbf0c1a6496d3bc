"""Which kind of journal a `--journal` names."""

import re
import sys

import pytest
from stepwell.common.imports import install_command

from stepwell.errors import JournalRefused
from stepwell.pool.shard.placement import PostgresBackend, SqliteBackend, find_journals, journal_backend


@pytest.mark.parametrize("journal", ["/var/lib/stepwell", "journal", "a:b"])
def test_a_path_is_a_folder_of_files(journal: str) -> None:
    assert isinstance(journal_backend(journal), SqliteBackend)


@pytest.mark.parametrize("journal", ["postgresql://db/pool", "postgres://ana@a:1,b:2/pool?sslmode=require"])
def test_a_url_of_postgresql_is_a_database(journal: str) -> None:
    assert isinstance(journal_backend(journal), PostgresBackend)


def test_another_url_is_refused() -> None:
    with pytest.raises(JournalRefused, match="a folder or a postgresql:// URL, not mysql://"):
        journal_backend("mysql://db/pool")


def test_a_missing_driver_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "psycopg", None)
    with pytest.raises(JournalRefused, match=re.escape(f"needs psycopg: {install_command('postgres')}")):
        find_journals("postgresql://db/pool", "data_pool")
