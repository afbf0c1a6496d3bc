import pytest

from stepwell.common.optional import require
from stepwell.errors import BadRequest, NotReady


def test_a_package_that_is_installed_is_imported() -> None:
    assert require("json", "train").__name__ == "json"


def test_a_missing_package_names_its_extra_and_what_needs_it() -> None:
    with pytest.raises(BadRequest, match=r"^no_such_package is not installed: pip install 'stepwell\[train\]'$"):
        require("no_such_package", "train")
    with pytest.raises(NotReady, match=r"^math_equal needs no_such_package: pip install 'stepwell\[rewards\]'$"):
        require("no_such_package", "rewards", purpose="math_equal", error=NotReady)
