import pytest
from stepwell.common.http import hide_password


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("postgresql://ana:se:cr@t@db:5432,other/pool", "postgresql://ana@db:5432,other/pool"),
        ("postgresql://db/pool?password=secret&sslmode=require", "postgresql://db/pool?password=...&sslmode=require"),
        ("postgresql://ana@db:5432/pool", "postgresql://ana@db:5432/pool"),
        ("/var/lib/stepwell", "/var/lib/stepwell"),
    ],
)
def test_a_password_is_not_shown(url: str, shown: str) -> None:
    assert hide_password(url) == shown
