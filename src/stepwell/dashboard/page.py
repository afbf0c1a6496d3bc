"""The page's files, as they lie in the folder beside this module."""

from pathlib import Path

from fastapi import APIRouter, HTTPException, Response

FOLDER = Path(__file__).parent / "page"
TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
    ".png": "image/png",
    ".txt": "text/plain; charset=utf-8",
}
"""What is served; a system's own table of types may call JavaScript anything."""


def page_router() -> APIRouter:
    router = APIRouter()

    @router.get("/", include_in_schema=False)
    async def index() -> Response:
        return _file("index.html")

    @router.get("/static/{name:path}", include_in_schema=False)
    async def static(name: str) -> Response:
        return _file(name)

    return router


def _file(name: str) -> Response:
    path = (FOLDER / name).resolve()
    media_type = TYPES.get(path.suffix)
    if media_type is None or not path.is_relative_to(FOLDER) or not path.is_file():
        raise HTTPException(404, "not found")
    return Response(path.read_bytes(), media_type=media_type)
