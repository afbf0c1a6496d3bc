"""Modules that stand in for packages of the community's environments that need a service, a GPU or a screen, or that no
index has. Each has no more than the names that its file uses."""

from types import ModuleType, SimpleNamespace
from typing import Any


def module(name: str, **names: Any) -> dict[str, ModuleType]:
    made = ModuleType(name)
    vars(made).update(names)
    return {name: made}


class KeywordDataset:
    """Of the BLEUBERI repository, a submodule that the source distribution does not have."""

    def __init__(self, path: str, tokenizer: Any) -> None:
        self.bleu = self.rouge = self.bertscore = None

    def bleu_reward_func(self, completions: list[str], references: list[str]) -> list[float]:
        """The share of the first reference's words."""
        words = set(references[0].split())
        return [len(words & set(completion.split())) / len(words) for completion in completions]

    def get_reward_funcs(self, names: list[str]) -> list[Any]:
        return [self.bleu_reward_func for _ in names]


BLEUBERI = module("training") | module("training.dataset", KeywordDataset=KeywordDataset)


class Ticker:
    """Of yahooquery: one stock's options, without the network."""

    financial_data = {"UNH": {"currentPrice": 300.0}}  # noqa: RUF012

    def __init__(self, symbols: list[str]) -> None:
        pass

    @property
    def option_chain(self) -> Any:
        import pandas as pd  # type: ignore[import-untyped]

        calls = [("UNH", "2999-01-15", "calls"), ("UNH", "2999-01-15", "puts"), ("UNH", "2999-06-18", "calls")]
        index = pd.MultiIndex.from_tuples(calls, names=["symbol", "expiration", "optionType"])
        row = {"lastPrice": 12.5, "strike": 310.0, "impliedVolatility": 0.3}
        return pd.DataFrame([row] * len(calls), index=index)


YAHOOQUERY = module("yahooquery", Ticker=Ticker)


class TavilyClient:
    """The web as tavily gives it: one page."""

    def __init__(self, api_key: str | None = None) -> None:
        pass

    def search(self, **options: Any) -> Any:
        page = {"title": "A page", "url": "https://example.com/page", "content": "Cats sleep for most of the day."}
        return {"results": [page]}

    def extract(self, *args: Any, **options: Any) -> Any:
        return {"results": [{"url": "https://example.com/page", "raw_content": "Cats sleep for most of the day."}]}


TAVILY = module("tavily", TavilyClient=TavilyClient)


class Anything:
    """A part of a scene that nobody looks at."""

    def __init__(self, *args: Any, **options: Any) -> None:
        self.shape = (0,)

    def add(self, *args: Any, **options: Any) -> None:
        pass

    from_trimesh = classmethod(lambda cls, *args, **options: cls())


class OffscreenRenderer:
    """Of pyrender, which wants EGL."""

    def __init__(self, viewport_width: int, viewport_height: int, point_size: float) -> None:
        self.shape = (viewport_height, viewport_width)

    def render(self, scene: Any, **options: Any) -> Any:
        import numpy as np

        return np.zeros((*self.shape, 3), np.uint8), np.zeros(self.shape)


PYRENDER = module(
    "pyrender",
    OffscreenRenderer=OffscreenRenderer,
    constants=SimpleNamespace(GLTF=SimpleNamespace(LINES=1), RenderFlags=SimpleNamespace(NONE=0)),
    **dict.fromkeys(
        (
            "PerspectiveCamera",
            "PointLight",
            "DirectionalLight",
            "MetallicRoughnessMaterial",
            "Scene",
            "Mesh",
            "Primitive",
        ),
        Anything,
    ),
)


class Screen:
    """A browser, its tabs and its pages in one, of which only the picture is used."""

    async def launch(self, headless: bool) -> "Screen":
        return self

    async def new_context(self, record_video_dir: str) -> "Screen":
        return self

    async def new_page(self) -> "Screen":
        return self

    async def goto(self, url: str, wait_until: str) -> None:
        pass

    async def screenshot(self, full_page: bool) -> bytes:
        return b"a picture"

    async def close(self) -> None:
        pass


class Starter:
    async def start(self) -> Any:
        return SimpleNamespace(chromium=Screen())


PLAYWRIGHT = module("playwright") | module(
    "playwright.async_api", Browser=Screen, Page=Screen, async_playwright=Starter
)


class Player:
    """Of poke_env, which plays on a server of Pokémon Showdown: every second battle is won."""

    def __init__(self, **options: Any) -> None:
        self.battles: dict[str, Any] = {}
        self.n_won_battles = self.n_finished_battles = 0

    async def battle_against(self, opponent: "Player", n_battles: int) -> None:
        for _ in range(n_battles):
            self.n_finished_battles += 1
            won = self.n_finished_battles % 2 == 0
            self.n_won_battles += won
            self.battles[f"battle {self.n_finished_battles}"] = SimpleNamespace(won=won)


POKE_ENV = (
    module("poke_env", RandomPlayer=Player)
    | module("poke_env.player", Player=Player)
    | module("poke_env.environment")
    | module("poke_env.environment.battle", AbstractBattle=Anything, Battle=Anything)
    | module("poke_env.environment.move", Move=Anything)
    | module("poke_env.environment.pokemon", Pokemon=Anything)
)
