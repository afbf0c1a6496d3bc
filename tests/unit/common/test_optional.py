import json
from pathlib import Path

import pytest
from stepwell.common.imports import install_command, require

from stepwell.errors import BadRequest, NotReady


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The metadata of an installed Stepwell, before those of the real one: as from the package index."""
    folder = tmp_path / "site" / "stepwell-9.9.9.dist-info"
    folder.mkdir(parents=True)
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: stepwell\nVersion: 9.9.9\n")
    monkeypatch.syspath_prepend(str(folder.parent))
    return folder


def came_from(installed: Path, **origin: object) -> None:
    (installed / "direct_url.json").write_text(json.dumps(origin))


def test_a_package_that_is_installed_is_imported() -> None:
    assert require("json", "train").__name__ == "json"


@pytest.mark.usefixtures("installed")
def test_a_missing_package_names_its_extra_and_what_needs_it() -> None:
    with pytest.raises(BadRequest, match=r"^no_such_package is not installed: pip install 'stepwell\[train\]'$"):
        require("no_such_package", "train")
    with pytest.raises(NotReady, match=r"^math_equal needs no_such_package: pip install 'stepwell\[rewards\]'$"):
        require("no_such_package", "rewards", purpose="math_equal", error=NotReady)


def test_what_was_installed_from_a_clone_is_installed_from_it_again(installed: Path, tmp_path: Path) -> None:
    clone = tmp_path / "my clone"
    clone.mkdir()
    came_from(installed, url=clone.as_uri(), dir_info={})
    assert install_command("demo") == f"pip install '{clone}[demo]'"
    came_from(installed, url=clone.as_uri(), dir_info={"editable": True})
    assert install_command("demo") == f"pip install -e '{clone}[demo]'"
    assert install_command() == f"pip install -e '{clone}'"


def test_a_clone_that_is_gone_is_not_named(installed: Path) -> None:
    came_from(installed, url="file:///no/such/clone", dir_info={})
    assert install_command("demo") == "pip install '.[demo]' in a clone of Stepwell"


def test_a_wheel_and_a_repository_are_named_by_their_addresses(installed: Path) -> None:
    came_from(installed, url="file:///tmp/stepwell-9.9.9-py3-none-any.whl", archive_info={})
    assert install_command("otel") == "pip install 'stepwell[otel] @ file:///tmp/stepwell-9.9.9-py3-none-any.whl'"
    came_from(installed, url="https://host/stepwell.git", vcs_info={"vcs": "git", "commit_id": "abc123"})
    assert install_command("otel") == "pip install 'stepwell[otel] @ git+https://host/stepwell.git@abc123'"


def test_a_metadata_file_that_cannot_be_read_breaks_no_hint(installed: Path) -> None:
    (installed / "direct_url.json").write_text("{")
    assert install_command("otel") == "pip install 'stepwell[otel]'"


def test_no_text_of_the_package_names_an_extra_by_hand() -> None:
    sources = Path(__file__).parents[3] / "src" / "stepwell"
    by_hand = [
        path.name
        for path in sources.rglob("*.py")
        if path.name != "optional.py"
        and ("pip install 'stepwell" in (text := path.read_text()) or "upgrade stepwell" in text)
    ]
    assert by_hand == []
