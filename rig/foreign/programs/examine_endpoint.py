"""OpenEnv's examination of an endpoint: `python examine_endpoint.py PACKAGES URL MODEL KEY` prints its report as JSON.

Only the module of the examination is loaded: the packages above it import much that is not installed.
"""

import json
import sys
import types
from dataclasses import asdict
from pathlib import Path


def main() -> None:
    packages, url, model, key = sys.argv[1:]
    sys.path.insert(0, packages)
    for name in ("openenv", "openenv.core", "openenv.core.harness", "openenv.core.harness.capture"):
        package = types.ModuleType(name)
        package.__path__ = [str(Path(packages, *name.split(".")))]
        sys.modules[name] = package
    from openenv.core.harness.capture.validate_llm import validate_llm

    sys.stdout.write(json.dumps(asdict(validate_llm(url, model, api_key=key, timeout=60))))


if __name__ == "__main__":
    main()
