"""What `stepwell up` prints when everything is ready."""

from pathlib import Path

import pytest

from stepwell.commands.launch_plan import ServedModel, UpSettings, make_plan
from stepwell.commands.state_folder import StateFolder
from stepwell.commands.up import ShownKey, welcome

KEY = "k" * 32
FILE = Path("/state/key")


def shown(key: ShownKey) -> str:
    settings = UpSettings(engine=("http://127.0.0.1:8001",))
    model = ServedModel(name='a "model"', root="org/model", window=4096)
    return welcome(make_plan(settings, model, StateFolder(Path("/state")), KEY), model.name, key)


@pytest.mark.parametrize("key", [ShownKey(FILE), ShownKey(FILE, KEY)])
def test_the_snippet_has_five_lines_of_python_with_the_models_own_name(key: ShownKey) -> None:
    printed = shown(key)
    snippet = printed[printed.index("import stepwell") :]
    compile(snippet, "snippet", "exec")
    assert len(snippet.splitlines()) == 5
    assert r'model="a \"model\""' in snippet


@pytest.mark.parametrize("key", [ShownKey(Path("/a state/key")), ShownKey(FILE, KEY)])
def test_a_shell_gets_the_base_url_and_the_key_for_plain_clients(key: ShownKey) -> None:
    printed = shown(key)
    assert "  base_url   http://127.0.0.1:8100/v1\n" in printed
    exports = [line for line in printed.splitlines() if line.startswith("export ")]
    value = KEY if key.key else "\"$(cat '/a state/key')\""
    assert exports == [
        f"export OPENAI_BASE_URL=http://127.0.0.1:8100/v1 OPENAI_API_KEY={value}",
        f"export ANTHROPIC_BASE_URL=http://127.0.0.1:8100 ANTHROPIC_API_KEY={value}",
    ]
    assert "ends after 300 s without a call" in printed


def test_the_key_is_printed_only_if_asked_for() -> None:
    printed = shown(ShownKey(FILE))
    assert KEY not in printed
    assert f"key        in {FILE} " in printed
    assert f'key=open("{FILE}").read().strip()' in printed
    asked = shown(ShownKey(FILE, KEY))
    assert f"http://127.0.0.1:8200/#key={KEY}" in asked
    assert f'key="{KEY}"' in asked
