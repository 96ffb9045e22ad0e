"""The page in headless Chromium: no network requests, no errors; it sorts and opens by mouse and
keys; axe-core passes.

Run by `make test-page`.
"""

import importlib.util
import json
import os
import sys
from pathlib import Path

import pytest

from jspeed.board.records import store
from jspeed.board.views import page

from . import chromium, many_records

# Marks, because pytest takes a module that skips itself for no tests at all, and that for a
# failure.
pytestmark = [
    pytest.mark.skipif("JSPEED_TEST_PAGE" not in os.environ, reason="run by make test-page"),
    pytest.mark.skipif(
        chromium.binary() is None,
        reason=f"no Chromium: none of {', '.join(chromium.NAMES)} is here",
    ),
]
SIZES = [(390, False), (390, True), (1280, False), (1280, True)]


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    many_records.demonstration(folder / "records")
    rule = "The rule <i>of</i> the clock.\n\nIts second part."
    page.write(page.contents(store.load(folder / "records"), rule, folder / "site"))
    return folder / "site" / "index.html"


@pytest.fixture(scope="module")
def tab():
    with chromium.chromium() as tab:
        yield tab


def order(tab) -> list[str]:
    rows = (
        "[...document.querySelectorAll('#track-fineweb-8xH100 tbody')].map(b =>"
        " b.rows[0].cells[1].innerText)"
    )
    return tab.run(f"{rows}.filter(Boolean)")


def test_it_loads_from_disk_and_nothing_else(tab, site):
    tab.open(site)
    asked = [
        e["params"]["request"]["url"]
        for e in tab.events
        if e.get("method") == "Network.requestWillBeSent"
    ]
    assert asked == [site.resolve().as_uri()]
    wrong = [
        e for e in tab.events if e.get("method") in ("Runtime.exceptionThrown", "Log.entryAdded")
    ]
    said = [e for e in tab.events if e.get("method") == "Runtime.consoleAPICalled"]
    assert wrong == said == []
    assert tab.run("document.title") == page.TITLE


def test_markup_shows_as_text(tab, site):
    tab.open(site)
    assert tab.run("document.querySelectorAll('main b, main i, main img, main script').length") == 0
    assert tab.run("document.title") == page.TITLE, "a device's name ran"
    text = tab.run("document.body.textContent")
    for expected in (
        '<b>markup</b> & "quotes" in a title',
        "<img src=x onerror=",
        "</details><script>1",
        "<i>of</i>",
    ):
        assert expected in text


def test_it_sorts_by_click_and_by_key(tab, site):
    tab.open(site)
    before = order(tab)
    heads = "#track-fineweb-8xH100 thead th:nth-child({})"
    state = f"document.querySelector({json.dumps(heads.format(3))}).getAttribute('aria-sort')"
    assert tab.run(state) is None
    tab.click(heads.format(3) + " button")
    times = tab.run(
        "[...document.querySelectorAll('#track-fineweb-8xH100 tbody')].map(b =>"
        " b.rows[0].cells[2].dataset.v)"
    )
    times = [float(value) for value in times if value]
    assert times == sorted(times) and tab.run(state) == "ascending" and order(tab) != before
    tab.press("Enter")  # the button has the focus
    assert tab.run(state) == "descending" and order(tab)[-1] != order(tab)[0]
    tab.press("Tab")
    tab.press("Tab")
    tab.press(" ")
    losses = f"document.querySelector({json.dumps(heads.format(5))}).getAttribute('aria-sort')"
    assert tab.run(losses) == "ascending" and tab.run(state) is None
    tab.click(heads.format(2) + " button")
    assert order(tab) == sorted(before)
    # An entry's second row went with its first.
    second = (
        "[...document.querySelectorAll('#track-fineweb-8xH100 table.board > tbody')].every(b =>"
        " b.rows.length >= 2)"
    )
    assert tab.run(second)


def test_details_open_by_click_and_by_key(tab, site):
    tab.open(site)
    is_open = "document.querySelector('.board details').open"
    assert not tab.run(is_open)
    tab.click(".board summary")
    assert tab.run(is_open)
    assert tab.run("document.querySelector('.board details pre').offsetHeight") > 50
    tab.press("Enter")
    assert not tab.run(is_open)
    tab.press(" ")
    assert tab.run(is_open)
    text = tab.run("document.querySelector('.board details').innerText")
    assert "Against r011" in text and "lines added" in text and "t-test p = " in text


def test_everything_is_reached_by_the_tab_key_in_order(tab, site):
    tab.open(site)
    tab.run("document.body.focus()")
    seen = []
    for _ in range(12):
        tab.press("Tab")
        seen.append(
            tab.run(
                "document.activeElement.tagName + ' ' +"
                " document.activeElement.textContent.slice(0, 20)"
            )
        )
    assert seen[0] == "A leaderboard.json" and seen[1] == "A fineweb/8xH100"
    assert "BUTTON recipe" in seen


@pytest.mark.parametrize(("width", "dark"), SIZES)
def test_it_fits_the_window(tab, site, width, dark):
    tab.size(width, dark=dark)
    tab.open(site)
    tab.run("document.querySelectorAll('details').forEach(d => d.open = true)")
    assert tab.run("document.documentElement.scrollWidth") <= width
    shade = tab.run("getComputedStyle(document.body).backgroundColor")
    assert (shade == "rgb(255, 255, 255)") != dark
    if folder := os.environ.get("JSPEED_SCREENSHOTS"):
        tab.open(site)
        tab.picture(Path(folder) / f"{width}-{'dark' if dark else 'light'}.png")


def axe() -> Path | None:
    """axe-core as some package brings it; none of ours holds a copy."""
    sys.path[:0] = filter(None, [os.environ.get("JSPEED_AXE")])
    for name in ("axe_playwright_python", "axe_core_python"):
        if (found := importlib.util.find_spec(name)) and found.origin:
            return Path(found.origin).with_name("axe.min.js")
    return next(iter(Path(__file__).parents[2].glob("node_modules/axe-core/axe.min.js")), None)


@pytest.mark.parametrize(("width", "dark"), SIZES)
def test_axe_finds_nothing(tab, site, width, dark):
    script = axe()
    if script is None:
        pytest.skip("no axe-core: pip install --no-deps axe-playwright-python, or make test-page")
    tab.size(width, dark=dark)
    tab.call("Page.setBypassCSP", enabled=True)
    try:
        tab.open(site)
        tab.run("document.querySelectorAll('details').forEach((d, n) => d.open = n < 6)")
        tab.run(script.read_text() + ";0")
        rules = {
            "runOnly": ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice"]
        }
        found = tab.run(
            f"axe.run(document, {json.dumps(rules)}).then(r => ({{bad: r.violations, good:"
            " r.passes.length}))"
        )
    finally:
        tab.call("Page.setBypassCSP", enabled=False)
    assert [
        (v["id"], v["nodes"][0]["html"][:200], v["nodes"][0]["failureSummary"])
        for v in found["bad"]
    ] == []
    assert found["good"] > 20
