"""vLLM's routes for adapters, without a model."""

from typing import Any

from tests.unit.trainers.scripted_engine import ScriptedEngine


class AdapterEngine(ScriptedEngine):
    def __init__(self) -> None:
        super().__init__()
        self.adapters: dict[str, str] = {}
        """Folders by name."""
        self.loaded: list[str] = []
        """All that were loaded, in their order."""

    def answer(self, path: str, body: Any) -> tuple[int, Any]:
        status, answer = super().answer(path, body)
        if status == 200 and path == "/v1/load_lora_adapter":
            self.adapters[body["lora_name"]] = body["lora_path"]
            self.loaded.append(body["lora_name"])
            return 200, "Success: LoRA adapter added."
        if status == 200 and path == "/v1/unload_lora_adapter":
            del self.adapters[body["lora_name"]]
            return 200, "Success: LoRA adapter removed."
        if path == "/v1/models":
            return status, {"data": [{"id": "base"}, *({"id": name} for name in self.adapters)]}
        return status, answer
