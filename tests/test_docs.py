"""Every relative link of the Markdown files leads somewhere, and the index of docs/ lists every page."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("benchmarks/*.md")]
LINK = re.compile(r"\]\(([^)\s]+)\)|(?:src|href)=\"([^\"]+)\"")


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    titles = re.findall(r"^#+ (.+)$", page.read_text(), re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    for link in ("".join(found) for found in LINK.findall(page.read_text())):
        if "://" in link:
            continue
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        assert target.is_file(), f"{link}: a file was expected (a folder has no page)"
        assert not anchor or anchor in anchors(target), f"{link}: no such heading"


def test_the_index_lists_every_page():
    index = (ROOT / "docs" / "index.md").read_text()
    linked = {Path(a or b).name for a, b in LINK.findall(index)}
    assert {page.name for page in ROOT.glob("docs/*.md")} - {"index.md"} <= linked
    menu = (ROOT / "mkdocs.yml").read_text()
    assert all(str(page.relative_to(ROOT)) in menu for page in PAGES)
