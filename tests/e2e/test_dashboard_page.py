"""The dashboard's page in Debian's Chromium, over the real application and made-up rollouts.

Whatever a test does, the page asks no one but its own server, and has nothing to say on its console.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect

from rig.browser import Faults, in_thread, open_browser, open_page
from rig.dashboard import MadeUpPool, make_dashboard
from rig.made_up_rollouts import DANGER, RigTokenizer, key_of
from rig.oidc_provider import CLIENT_ID, CLIENT_SECRET, serve_provider
from rig.page_checks import faint_texts, unnamed_controls
from stepwell.access.access_keys import AccessKeys
from stepwell.dashboard.login import ListedPeople, OidcClient, OidcLogin
from stepwell.pool.api.stats import TimeSeries
from stepwell.pool.api.watching import TrajectoryState

KEY = "a-control-key-of-tests"
WITH_DANGER, NAMED_DANGEROUSLY, MARKED_DANGEROUSLY = 3, 13, 11
"""Numbers of rollouts, as rig/made_up_rollouts.py makes them."""


class PoolWithDanger(MadeUpPool):
    async def series(self, *, seconds: float) -> TimeSeries:
        """Causes can be named by agents."""
        series = await super().series(seconds=seconds)
        train = series.channels["train"]
        dropped = {**train.dropped_tokens, f"left out: {DANGER}": [40] * len(series.ends)}
        return replace(series, channels={"train": replace(train, dropped_tokens=dropped)})


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with open_browser() as browser:
        yield browser


@pytest.fixture
def pool() -> PoolWithDanger:
    return PoolWithDanger(400)


@pytest.fixture
def url(pool: PoolWithDanger) -> Iterator[str]:
    with in_thread(make_dashboard(pool, tokenizer=RigTokenizer())) as url:
        yield url


@pytest.fixture
def tab(browser: Browser, url: str) -> Iterator[tuple[Page, Faults]]:
    with open_page(browser, url) as (page, faults):
        page.goto(url)
        yield page, faults
        assert faults.strayed == []
        assert faults.said == []


@pytest.fixture
def page(tab: tuple[Page, Faults]) -> Page:
    return tab[0]


@pytest.fixture
def faults(tab: tuple[Page, Faults]) -> Faults:
    return tab[1]


def press(page: Page, keys: str) -> None:
    for key in keys.split():
        page.keyboard.press(key)


def listed(page: Page) -> None:
    """The list, once it has rows."""
    press(page, "g t")
    expect(page.locator("table.rows td.uid").first).to_be_visible()


def open_trajectory(page: Page, url: str, number: int) -> None:
    uid, prompt = key_of(number)
    page.goto(f"{url}/#/trajectories?uid=t-{number:06d}")
    expect(page.locator(".found")).to_contain_text("1 of 400")
    press(page, "Enter")
    expect(page.locator("h1 .uid")).to_have_text(uid)
    expect(page.locator(".crumbs")).to_contain_text(prompt)


def decide(page: Page, key: str, *, who: str = "", why: str = "", **own: str) -> None:
    press(page, key)
    dialog = page.get_by_role("dialog")
    for label, value in {**own, "Who": who, "Why": why}.items():
        if value:
            dialog.get_by_label(label).fill(value)
    press(page, "Enter")
    expect(dialog).to_have_count(0)


def test_the_overview_says_that_steps_are_left_out_for_their_sampling(
    browser: Browser, pool: PoolWithDanger, url: str
) -> None:
    pool.recent.update({"truncated": 620, "": 380})
    with open_page(browser, url) as (page, faults):
        page.goto(url)
        alarm, note = page.locator("p.note").nth(0), page.locator("p.note").nth(1)
        expect(alarm).to_have_text("canary: no decision after 1 min")
        expect(note).to_contain_text("62% of the last 1,000 steps of channel train are left out")
        expect(note).to_contain_text("--sampling train=on_policy")
        expect(page.locator("figure.chart .uplot")).to_have_count(8)
        assert faint_texts(page) == []
        assert (faults.strayed, faults.said) == ([], [])


def test_every_view_opens_by_keyboard(page: Page, url: str) -> None:
    expect(page.locator("figure.chart .uplot")).to_have_count(8)

    listed(page)
    press(page, "j j k j")
    uid = page.locator("tr.current td.uid").first.inner_text()
    press(page, "Enter")
    expect(page.locator("h1 .uid")).to_have_text(uid)

    press(page, "t")
    expect(page.locator(".tokens").first).to_be_visible()
    press(page, "s")
    expect(page.locator(".rollout")).to_have_count(4)
    press(page, "j Enter")
    expect(page.locator(".trajectory h1 .uid")).to_be_visible()
    press(page, "Escape")
    expect(page.locator(".rollout")).to_have_count(4)
    press(page, "Escape Escape")
    expect(page.locator("tr.current td.uid").first).to_have_text(uid)

    press(page, "g a")
    expect(page.locator("nav a[aria-current]")).to_have_text("Audit trail")
    press(page, "?")
    expect(page.get_by_role("dialog")).to_contain_text("trajectories")
    press(page, "Escape g o")
    expect(page.locator("nav a[aria-current]")).to_have_text("Overview")
    listed(page)
    press(page, "/ a b c")
    expect(page.get_by_label("Search")).to_have_value("abc")


def test_the_next_batch_is_shown_with_what_is_not_in_it_and_why(page: Page, pool: PoolWithDanger) -> None:
    expect(page.locator("figure.chart .uplot")).to_have_count(8)
    press(page, "g n")
    batch, waiting = page.locator(".preview table").nth(0), page.locator(".preview table").nth(1)
    expect(batch.locator("tbody tr")).to_have_count(6)
    expect(batch.locator("caption")).to_have_text("In the next batch")
    expect(page.locator(".preview .facts")).to_contain_text("The trainer asked for 6 groups last, at ")
    first = batch.locator("tbody tr").first
    expect(first).to_contain_text("4 of 4")
    expect(first.locator("td.prompt")).not_to_have_text("–")
    expect(waiting).to_contain_text("2 of 4 rollouts are complete, 2 running")
    expect(waiting).to_contain_text("the batch is full: its turn comes later")
    page.get_by_label("Channel").select_option("validation")
    expect(page.locator(".preview .note")).to_contain_text("A fetch would wait for 6 ready groups")
    assert "channel=validation" in page.url
    page.get_by_label("Channel").select_option("train")
    prompt = first.locator("td.uid").inner_text()
    first.locator("td.uid a").click()
    expect(page.locator("h1 .uid")).to_have_text(prompt)


def test_what_a_model_or_an_agent_wrote_stays_text(page: Page, url: str, pool: PoolWithDanger) -> None:
    expect(page.locator("figure[aria-label^=Waste] .legend")).to_contain_text(DANGER)

    open_trajectory(page, url, WITH_DANGER)
    expect(page.locator(".turn.user pre").first).to_contain_text(DANGER)
    decide(page, "m", who=DANGER[:80], why=DANGER, Mark="<img src=x onerror=hacked()>"[:40])
    expect(page.locator("aside table")).to_contain_text(DANGER)
    press(page, "t")
    expect(page.locator(".tokens").first).to_contain_text(DANGER)
    press(page, "s")
    expect(page.locator(".rollout")).to_have_count(4)
    open_trajectory(page, url, NAMED_DANGEROUSLY)
    open_trajectory(page, url, MARKED_DANGEROUSLY)
    expect(page.locator("h1 .mark")).to_have_text("<b onclick=hacked()>")
    press(page, "g a")
    expect(page.locator("main table")).to_contain_text(DANGER)

    assert page.evaluate("window.hacked") is None
    assert page.locator("main script, main img, main b[onclick]").count() == 0


def test_what_is_decided_on_the_page_reaches_the_pool(page: Page, url: str, pool: PoolWithDanger) -> None:
    page.goto(f"{url}/#/trajectories?state=ready")
    expect(page.locator(".found")).to_contain_text("of 400")
    rows = [page.locator("td.uid").nth(2 * i).inner_text() for i in range(3)]

    press(page, "x j x")
    decide(page, "r", who="ada", why="guessed")
    expect(page.locator(".notice")).to_have_text("Reject: 2 done")
    assert [pool.rows[uid].state for uid in rows] == [
        TrajectoryState.DROPPED,
        TrajectoryState.DROPPED,
        TrajectoryState.READY,
    ]
    expect(page.locator("td.uid").first).to_have_text(rows[2])

    press(page, "k Enter")
    expect(page.locator("h1 .uid")).to_have_text(rows[2])
    decide(page, "l", Reward="0.25", why="half right")
    decide(page, "m", Mark="gold")
    expect(page.locator("h1 .mark")).to_have_text("gold")
    assert pool.rows[rows[2]].reward == 0.25
    assert pool.rows[rows[2]].marks == ("gold",)
    assert [(entry.by, entry.action) for entry in pool.entries] == [
        ("ada", "mark"), ("ada", "relabel"), ("ada", "reject"), ("ada", "reject"),
    ]  # fmt: skip
    press(page, "g a")
    expect(page.locator("main tbody tr").nth(1)).to_contain_text("half right")


def test_a_decision_that_comes_too_late_says_so(page: Page, url: str, pool: PoolWithDanger) -> None:
    page.goto(f"{url}/#/trajectories?state=trained")
    expect(page.locator(".found")).to_contain_text("of 400")
    decide(page, "r", who="ada")

    expect(page.locator(".notice")).to_contain_text("too late")


def test_filters_combine_and_are_in_the_address(page: Page, url: str, pool: PoolWithDanger) -> None:
    listed(page)
    page.get_by_label("State").select_option("dropped")
    page.get_by_label("Cause").select_option("stale")
    page.get_by_label("Reward from").fill("0.5")
    wanted = [r for r in pool.rows.values() if r.cause == "stale" and r.reward is not None and r.reward >= 0.5]
    expect(page.locator(".found b")).to_have_text(str(len(wanted)))
    page.reload()

    expect(page.locator(".found b")).to_have_text(str(len(wanted)))
    expect(page.get_by_label("Cause")).to_have_value("stale")
    page.get_by_label("Search").fill("NO SUCH TEXT")
    expect(page.locator(".found b")).to_have_text("0")
    page.get_by_role("button", name="Clear").click()
    expect(page.locator(".found b")).to_have_text("400")
    assert page.url == f"{url}/#/trajectories"


def test_tokens_have_three_colours_and_tell_of_themselves(page: Page, url: str) -> None:
    open_trajectory(page, url, WITH_DANGER)
    press(page, "1")
    expect(page.locator(".tok.p0").first).to_be_visible()
    press(page, "2")
    expect(page.locator(".tokens .tok.m0").first).to_be_visible()
    press(page, "3")
    expect(page.locator(".tokens .tok.v0").first).to_be_visible()

    token = page.locator(".tokens .tok.v0").first
    token.hover()
    for part in ("id ", "log-probability -", "policy version 0", "trained"):
        expect(page.locator(".readout")).to_contain_text(part)
    page.locator(".tokens").first.focus()
    before = page.locator(".readout").inner_text()
    press(page, "ArrowRight")
    expect(page.locator(".readout")).not_to_have_text(before)


def test_it_says_why_a_trajectory_was_not_trained(page: Page, url: str) -> None:
    open_trajectory(page, url, 24)

    expect(page.locator(".why")).to_contain_text("stale")


@pytest.mark.parametrize("width", [360, 620, 1200])
def test_no_title_of_a_chart_is_cut(page: Page, width: int) -> None:
    page.set_viewport_size({"width": width, "height": 800})
    titles = page.locator(".chart h3")
    expect(titles).to_have_count(8)
    cut = "all => all.filter((h3) => h3.scrollWidth > h3.clientWidth + 1).map((h3) => h3.textContent)"
    assert titles.evaluate_all(cut) == []
    assert page.evaluate("document.documentElement.scrollWidth") <= width, "the page does not scroll sideways"


@pytest.mark.parametrize("width", [1360, 1345])
def test_the_filters_are_one_row(page: Page, width: int) -> None:
    """1345: the same window, where a scroll bar takes its room."""
    page.set_viewport_size({"width": width, "height": 800})
    listed(page)
    controls = page.locator(".filters input, .filters select, .filters button")
    edges = controls.evaluate_all("all => all.map((n) => n.getBoundingClientRect()).map((r) => [r.right, r.bottom])")
    assert len(edges) == 14
    assert max(right for right, _ in edges) <= width
    assert max(bottom for _, bottom in edges) - min(bottom for _, bottom in edges) <= 2


def test_no_view_is_wider_than_a_phone(page: Page, url: str) -> None:
    def width() -> int:
        return int(page.evaluate("document.documentElement.scrollWidth"))

    page.set_viewport_size({"width": 320, "height": 640})
    expect(page.locator("figure.chart .uplot")).to_have_count(8)
    assert width() == 320
    listed(page)
    assert width() == 320
    open_trajectory(page, url, WITH_DANGER)
    assert width() == 320
    press(page, "t")
    expect(page.locator(".tokens").first).to_be_visible()
    assert width() == 320
    decide(page, "m", who="ada", why="odd", Mark="odd")
    press(page, "g a")
    expect(page.locator("main td").first).to_be_visible()
    assert width() == 320
    press(page, "g n")
    expect(page.locator(".preview td.prompt").first).to_be_visible()
    assert width() == 320


@pytest.mark.parametrize("dark", [False, True])
def test_it_follows_the_system_and_is_readable(browser: Browser, url: str, dark: bool) -> None:
    with open_page(browser, url, dark=dark) as (page, faults):
        page.goto(url)
        expect(page.locator("table.plain td.n").first).to_be_visible()
        paper = page.evaluate("getComputedStyle(document.body).backgroundColor.match(/\\d+/)[0]")
        assert (int(paper) < 128) is dark
        assert faint_texts(page) == []
        assert unnamed_controls(page) == []
        listed(page)
        assert faint_texts(page) == []
        assert unnamed_controls(page) == []
        press(page, "g n")
        expect(page.locator(".preview td.prompt").first).to_be_visible()
        assert faint_texts(page) == []
        assert unnamed_controls(page) == []
        open_trajectory(page, url, WITH_DANGER)
        for key in "123":
            press(page, key)
            assert faint_texts(page) == []
        assert unnamed_controls(page) == []
        assert faults.none()


def test_the_theme_can_be_switched_and_is_remembered(page: Page) -> None:
    switch = page.get_by_role("button", name="Theme")
    switch.click()
    switch.click()
    expect(switch).to_have_text("Theme: dark")
    page.reload()

    expect(switch).to_have_text("Theme: dark")
    assert page.evaluate("getComputedStyle(document.documentElement).colorScheme") == "dark"


def test_the_key_is_asked_for_or_taken_from_the_address(browser: Browser, pool: PoolWithDanger) -> None:
    app = make_dashboard(pool, tokenizer=RigTokenizer(), control_keys=[KEY])
    with in_thread(app) as url:
        with open_page(browser, url) as (page, _):
            page.goto(url)
            page.get_by_label("Key", exact=True).fill("wrong")
            press(page, "Enter")
            expect(page.locator(".notice")).to_contain_text("unknown, expired or revoked")
            page.get_by_label("Key", exact=True).fill(KEY)
            press(page, "Enter")
            expect(page.locator("#pool")).to_contain_text("data_pool")
            expect(page.locator(".notice")).to_be_empty()
        with open_page(browser, url) as (page, faults):
            page.goto(f"{url}/#key={KEY}")
            expect(page.locator("#pool")).to_contain_text("data_pool")
            assert KEY not in page.url
            assert faults.none()


def test_a_person_logs_in_decides_under_their_own_name_and_logs_out(browser: Browser, pool: PoolWithDanger) -> None:
    with serve_provider(person={"email": "ann@example.org", "email_verified": True}) as provider:
        client = OidcClient(provider.url, CLIENT_ID, CLIENT_SECRET)
        login = OidcLogin(client, ListedPeople([], ["ann@example.org"]), AccessKeys([KEY]))
        app = make_dashboard(pool, tokenizer=RigTokenizer(), control_keys=[KEY], login=login)
        with in_thread(app) as url, open_page(browser, url) as (page, faults):
            page.goto(f"{url}/#/trajectories")
            page.get_by_label("Key", exact=True).fill("wrong")
            press(page, "Enter")
            expect(page.locator(".notice")).to_contain_text("unknown, expired or revoked")
            faults.said.clear()  # the browser tells of every 401
            page.get_by_role("button", name="Log in").click()
            expect(page.get_by_role("button", name="Log out ann@example.org")).to_be_visible()
            assert page.url == f"{url}/#/trajectories", "the view from before"
            assert page.evaluate("document.cookie") == ""

            press(page, "j")
            decide(page, "m", why="odd", Mark="odd")
            expect(page.locator(".notice")).to_contain_text("1 done")
            assert [entry.by for entry in pool.entries] == ["oidc ann@example.org"]
            assert faults.said == []
            assert {stray.partition("?")[0] for stray in faults.strayed} == {f"{provider.url}/authorize"}

            page.get_by_role("button", name="Log out").click()
            expect(page.get_by_role("button", name="Log in")).to_be_visible()
            expect(page.get_by_role("button", name="Log out")).to_be_hidden()


def test_a_pool_that_is_away_is_told_in_one_line_and_what_was_shown_stays(
    page: Page, faults: Faults, pool: PoolWithDanger
) -> None:
    expect(page.locator("table.plain td.n").first).to_be_visible()
    pool.away = True
    expect(page.locator(".notice")).to_contain_text("The pool cannot be reached")
    expect(page.locator("table.plain").first).to_contain_text("train")
    pool.away = False
    expect(page.locator(".notice")).to_be_empty()

    assert all("503" in said for said in faults.said)
    faults.said.clear()


def test_a_page_out_of_sight_asks_for_nothing(browser: Browser, url: str) -> None:
    with open_page(browser, url) as (page, _):
        page.add_init_script(
            "Object.defineProperty(document, 'visibilityState', {get: () => window.seen ?? 'visible'})"
        )
        page.clock.install()
        page.goto(url)
        expect(page.locator("table.plain td.n").first).to_be_visible()
        page.evaluate("window.seen = 'hidden'")
        page.clock.run_for(3_000)  # the question that was already due
        asked: list[str] = []
        page.on("request", lambda request: asked.append(request.url))
        page.clock.run_for(60_000)
        assert asked == []

        with page.expect_request(lambda _: True):  # it asks again
            page.evaluate("window.seen = 'visible'; document.dispatchEvent(new Event('visibilitychange'))")
        expect(page.locator("table.plain td.n").first).to_be_visible()


def test_no_file_of_the_page_makes_html_of_data() -> None:
    folder = Path("src/stepwell/dashboard/page")
    scripts = {path.name: path.read_text() for path in folder.glob("*.js")}
    forbidden = ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "Function(", "srcdoc")

    assert len(scripts) > 10
    assert [(name, word) for name, text in scripts.items() for word in forbidden if word in text] == []
    assert "style=" not in (folder / "index.html").read_text()
