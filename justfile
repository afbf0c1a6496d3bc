# The parts of CI. `just` without arguments lists them.

python := env("PYTHON", ".venv/bin/python")
bin := parent_directory(python)
export PYTHONDONTWRITEBYTECODE := ""  # a run finds what the last one compiled, also where images forbid that

default:
    @just --list

# make .venv with everything for development
setup:
    python3 -m venv .venv
    .venv/bin/pip install -e '.[dev]'

# style, types, import contracts
check:
    {{bin}}/ruff check
    {{bin}}/ruff format --check
    {{bin}}/mypy
    {{bin}}/lint-imports --no-logo

# the fast lane: no Ray, no vLLM, about two minutes on two cores
test *args:
    {{python}} -m pytest -n 2 tests/unit benchmarks/tests/unit {{args}}

# real Ray, real HTTP, processes that are killed; a fake engine; the benchmarks in short
integration *args:
    {{python}} -m pytest tests/integration benchmarks/tests/integration {{args}}

# with real vLLM (built into a cache on first use)
e2e *args:
    {{python}} -m pytest tests/e2e benchmarks/tests/e2e {{args}}

# every folder of examples/, as its README says
examples *args:
    {{python}} -m pytest tests/examples {{args}}

# what takes many minutes; CI runs a shorter form of each
nightly *args:
    {{python}} -m pytest -m nightly -o faulthandler_timeout=0 {{args}}

# one file per threat: the hostile candidates, what may be asked by whom, what is left after forgetting
security *args:
    {{python}} -m pytest tests/security {{args}}

# sdist and wheel, the workflows, the citation and the Dockerfile
publishing *args:
    {{python}} -m pytest tests/publishing {{args}}

# sdist and wheel, into dist/
dist:
    {{python}} scripts/release.py build dist

# the documentation site, into site/; nothing in it needs the internet
docs:
    {{python}} scripts/reference.py
    {{python}} scripts/api_docs.py
    {{python}} -m mkdocs build --strict

# the versions and hashes of every package of the container, of CI and of releases, into locks/; to be run after a change of dependencies
lock:
    {{python}} scripts/lock.py

# what the environment contains, as a CycloneDX document; `just sbom FILE PYTHON` for another environment
sbom file="sbom.json" of=python:
    {{python}} scripts/lock.py --sbom {{of}} {{file}}

# every benchmark, or those that are named; it ends with a table of all targets, and fails if one is missed; --resume goes on after an interruption
bench *names:
    {{python}} -m benchmarks {{names}}

# docs/benchmarks.md, and the figures that the READMEs quote, from benchmarks/results/
bench-page:
    {{python}} -m benchmarks.page

# a pool whose shards are killed a hundred times under load; some four minutes
chaos-pool:
    {{python}} -m benchmarks.chaos_pool --kills 100

# faults in a real cluster, one row each; `just survival --only gateways --quick` is one of them in its short form
survival *args:
    {{python}} -m benchmarks.survival {{args}}
