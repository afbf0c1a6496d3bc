"""What `stepwell up` prints when everything is ready."""

from pathlib import Path

from stepwell.config.up import UpSettings
from stepwell.up.command_up import welcome
from stepwell.up.engine_model import ServedModel
from stepwell.up.launch_plan import make_plan
from stepwell.up.state_folder import StateFolder

KEY = "k" * 32


def test_the_snippet_has_five_lines_of_python_with_the_models_own_name() -> None:
    settings = UpSettings(engine=("http://127.0.0.1:8001",))
    model = ServedModel(name='a "model"', root="org/model", window=4096)
    shown = welcome(make_plan(settings, model, StateFolder(Path("/state")), KEY), model.name, KEY)
    snippet = shown[shown.index("import stepwell") :]
    compile(snippet, "snippet", "exec")
    assert len(snippet.splitlines()) == 5
    assert r'model="a \"model\""' in snippet
    assert f"http://127.0.0.1:8200/#key={KEY}" in shown
