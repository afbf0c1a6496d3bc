"""`python -m stepwell.envs my_env.py serve …` runs an environment that imports atroposlib, without that package.

atroposlib's modules are replaced by stepwell.envs for this process; the file itself is not changed.
"""

import runpy
import sys
from pathlib import Path

import stepwell.envs
from stepwell.envs.cli import fail

REPLACED = (
    "atroposlib",
    "atroposlib.envs",
    "atroposlib.envs.base",
    "atroposlib.envs.server_handling",
    "atroposlib.envs.server_handling.openai_server",
    "atroposlib.envs.server_handling.server_baseline",
    "atroposlib.envs.server_handling.server_manager",
    "atroposlib.type_definitions",
    "atroposlib.utils",
    "atroposlib.utils.tokenize_for_trainer",
)


def main() -> None:
    if len(sys.argv) < 2:
        fail("stepwell.envs", "name a file: python -m stepwell.envs FILE COMMAND [FLAGS]", status=2)
    file = Path(sys.argv[1]).absolute()
    if not file.exists():
        fail("stepwell.envs", f"there is no file {file}", status=2)
    sys.modules.update(dict.fromkeys(REPLACED, stepwell.envs))
    del sys.argv[0]
    sys.path.insert(0, str(file.parent))  # as `python FILE` does: it may import files beside it
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
