"""The environments that ask about a picture, which is one pixel here."""

from base64 import b64decode
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.originals.atropos.row import Answer, Json, Row, in_turn

PNG = b64decode("iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mP8z8BQDwAEhQGAhKmMIQAAAABJRU5ErkJggg==")
ADDRESS = "https://pictures.invalid/one.png"


def answering(answer: str) -> Answer:
    return in_turn(f"It is surely <answer>{answer}</answer>", "It is <answer>something else</answer>")


def with_pictures(folder: Path) -> None:
    """The column `image` gives pictures of Pillow, as those of the hub do."""
    import datasets

    original: Callable[..., Any] = datasets.load_dataset
    datasets.load_dataset = lambda *args, **options: original(*args, **options).cast_column("image", datasets.Image())


def with_the_address(folder: Path) -> None:
    """`requests` has the picture at ADDRESS, and nothing else."""
    import requests

    def get(url: str, **options: Any) -> requests.Response:
        response = requests.Response()
        response.status_code, response._content = (200, PNG) if url == ADDRESS else (404, b"")
        return response

    requests.get = get  # type: ignore[assignment]


def pictured(name: str, data_set: str, columns: Json, answer: Answer, **more: Any) -> Row:
    prepare = with_the_address if "image_url" in columns else with_pictures
    return Row(file=f"multimodal_dpo/{name}.py", data={data_set: [columns]}, answer=answer, prepare=prepare, **more)


BOXED = in_turn("It is surely \\boxed{3}", "It is surely \\boxed{4}")

ROWS: tuple[Row, ...] = (
    pictured(
        "clevr_complex",
        "MMInstruction/Clevr_CoGenT_TrainA_70K_Complex",
        {"image": PNG, "problem": "How many balls?", "solution": "3"},
        BOXED,
    ),
    pictured(
        "clevr_cogen_a_train",
        "leonardPKU/clevr_cogen_a_train",
        {"image": PNG, "problem": "How many balls?", "solution": "<answer> 3 </answer>"},
        BOXED,
        only_starts="its postprocess_histories returns nothing",
    ),
    pictured(
        "ocr_vqa", "howard-hou/OCR-VQA", {"image": PNG, "questions": ["Title?"], "answers": ["Emma"]}, answering("Emma")
    ),
    pictured("pixmo_clocks", "junyeong-nero/clock-dataset", {"image": PNG, "hour": 3, "minute": 5}, answering("3:05")),
    pictured(
        "pixmo_count", "allenai/pixmo-count", {"image_url": ADDRESS, "label": "balls", "count": 3}, answering("3")
    ),
    pictured(
        "pixmo_point_explanations",
        "allenai/pixmo-point-explanations",
        {"image_url": ADDRESS, "question": "Where?", "inline_text": ["left"]},
        answering("left"),
    ),
)
