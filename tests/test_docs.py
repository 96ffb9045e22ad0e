"""Links of the Markdown files lead somewhere, the index lists every page, and what pages name in
the code is there."""

import ast
import re
from pathlib import Path

import pytest

from jspeed.cli.bench import BENCHES

ROOT = Path(__file__).parents[1]
FIGURES = [*ROOT.glob("benchmarks/*.md"), *ROOT.glob("lab/*.md")]
READ = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]
PAGES = [*READ, *FIGURES]
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


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_picture_has_words_for_who_cannot_see_it(page):
    text = page.read_text()
    pictures = re.findall(r"<img [^>]*>", text)
    said = [*re.findall(r"!\[([^\]]*)\]\(", text)]
    said += ["".join(re.findall(r'alt="([^"]*)"', picture)) for picture in pictures]
    assert all(len(words.split()) >= 4 for words in said), said


def test_the_index_lists_every_page():
    index = (ROOT / "docs" / "index.md").read_text()
    linked = {Path(a or b).name for a, b in LINK.findall(index)}
    assert {page.name for page in ROOT.glob("docs/**/*.md")} - {"index.md"} <= linked
    menu = (ROOT / "mkdocs.yml").read_text()
    assert all(str(page.relative_to(ROOT)) in menu for page in PAGES)


NUMBER = r"\d[\d,]*(?:\.\d+)?"
UNIT = (
    r"s|ms|us|ns|seconds?|milliseconds|microseconds|nats|GB|TB|TB/s|GB/s|TFLOP/s|tokens/s"
    r"|tokens a second|%"
)
FIGURE = re.compile(
    rf"(?<![\w.`-])({NUMBER})(?:(?: to | and | \+- |, )({NUMBER}))? ?(?:{UNIT})(?![\w/])"
)


def figures(text: str) -> list[str]:
    """The numbers with a unit in a page's prose and tables."""
    for left_out in (
        r"```.*?```",
        r"`[^`]*`",
        r"<!-- leaderboard.*?/leaderboard -->",
        r"(?<=\])\([^)]*\)",
        r"<[^>]*>",
    ):
        text = re.sub(left_out, "", text, flags=re.S)
    return [number for found in FIGURE.findall(text) for number in found if number]


def recorded() -> set[str]:
    """Every number of the notebooks that the laboratory's index lists, of the index, and of what
    commands write."""
    index = (ROOT / "lab" / "README.md").read_text()
    listed = [ROOT / "lab" / name for name in re.findall(r"\]\((2[\w-]+\.md)\)", index)]
    assert {page.name for page in ROOT.glob("lab/2*.md")} == {page.name for page in listed}
    pages = [ROOT / "lab" / "README.md", *listed, *ROOT.glob("lab/*.csv")]
    pages += [*ROOT.glob("benchmarks/plan.*"), ROOT / "benchmarks" / "speed.md"]
    return {
        number.replace(",", "") for page in pages for number in re.findall(NUMBER, page.read_text())
    }


def quoted(number: str, known: set[str]) -> bool:
    """Whether ``number`` is one of ``known``, or one of them rounded to its digits."""
    number = number.rstrip(",").replace(",", "")
    digits = len(number.partition(".")[2])
    return number in known or any(f"{float(each):.{digits}f}" == number for each in known)


def test_pages_quote_no_figure_that_the_laboratory_has_not():
    known = recorded()
    for page in [ROOT / "README.md", *ROOT.glob("docs/**/*.md")]:
        missing = [each for each in figures(page.read_text()) if not quoted(each, known)]
        assert not missing, f"{page}: in no notebook of lab/README.md: {missing}"


def test_a_figure_without_a_notebook_is_noticed():
    known = recorded()
    assert figures("`1 s` takes 123.456 s, 7,654,321 to 7,654,329 tokens/s on 3 GPUs") == [
        "123.456",
        "7,654,321",
        "7,654,329",
    ]
    assert not quoted("123.456", known) and not quoted("7,654,321", known)
    assert quoted("153", {"153.3"}) and not quoted("153.4", {"153.3"})


def sentences(text: str) -> list[str]:
    """The sentences of a page's prose, without code, tables and links' targets."""
    for left_out in (r"```.*?```", r"<[a-z/!][^>]*>", r"^(    |\|).*?$", r"(?<=\])\([^)]*\)"):
        text = re.sub(left_out, "", text, flags=re.S | re.M)
    blocks = re.split(
        r"\n\s*\n|^\s*(?:[-*]|\d+\.) |^#.*$", re.sub(r"`[^`]*`", "code", text), flags=re.M
    )
    return [each for block in blocks for each in re.split(r"(?<=[.!?:;])\s+", block)]


@pytest.mark.parametrize("page", READ, ids=lambda page: str(page.relative_to(ROOT)))
def test_no_sentence_has_more_than_twenty_five_words(page):
    assert [each for each in sentences(page.read_text()) if len(each.split()) > 25] == []


def long_sentences_of_docstrings() -> list[tuple[int, str, str]]:
    """(words, file, sentence) of those with more than 25 words, of all that has a public name."""
    found = []
    for path in ROOT.glob("python/jspeed/**/*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            kinds = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
            if isinstance(node, kinds) and not getattr(node, "name", "").startswith("_"):
                text = re.sub(r"^>>>.*$", "", ast.get_docstring(node) or "", flags=re.M)
                counted = ((len(each.split()), str(path), each) for each in sentences(text))
                found += [each for each in counted if each[0] > 25]
    return sorted(found, reverse=True)


def test_few_sentences_of_docstrings_have_more_than_25_words():
    """The limit is what was there, and only falls; none has more than 30."""
    long = long_sentences_of_docstrings()
    assert not long or long[0][0] <= 30, long[0]
    assert len(long) <= 4, long


@pytest.mark.parametrize("page", sorted(ROOT.glob("python/jspeed/*")), ids=lambda page: page.name)
def test_no_sentence_of_a_comment_has_more_than_25_words(page):
    """Of lines that are nothing but a comment; those that follow each other are one text."""
    for path in [page] if page.suffix == ".py" else page.rglob("*.py"):
        for block in re.findall(r"(?:^ *# .*\n)+", path.read_text(), re.M):
            text = re.sub(r"^ *# ?", "", block, flags=re.M)
            assert [each for each in sentences(text) if len(each.split()) > 25] == [], path


def test_the_front_page_is_one_screen():
    """By wc -w; a new track with runs takes some 18 words."""
    assert len((ROOT / "README.md").read_text().split()) <= 500


@pytest.mark.parametrize("page", [*ROOT.glob("docs/**/*.md")], ids=lambda page: page.name)
def test_a_page_opens_with_what_the_reader_gets_and_a_command(page):
    """But for the two that are lists: the index and the API."""
    opening = page.read_text().split("\n## ")[0]
    if page.name not in ("index.md", "api.md", "comparison.md"):
        assert re.match(r"# .+\n\n[A-Z]", opening), "a sentence was expected first"
        assert "```sh" in opening or re.search(r"^    \w", opening, re.M), "a command was expected"


def defined(path: Path) -> set[str]:
    """The names that a module defines or imports at its top level."""
    found = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            found |= {name.asname or name.name for name in node.names}
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found |= {
                name.id
                for target in targets
                for name in ast.walk(target)
                if isinstance(name, ast.Name)
            }
    return found


def exists(dotted: str) -> bool:
    """Whether ``jspeed.room.module.name`` is a package, a module, or a name in one."""
    folder = ROOT / "python"
    first, *rest = dotted.split(".")
    for number, part in enumerate([first, *rest]):
        if (folder / part).is_dir():
            folder /= part
            continue
        left = [first, *rest][number:]
        if any((folder / f"{part}{ending}").is_file() for ending in (".py", ".pyi")):
            return len(left) == 1 or left[1] in defined(folder / f"{part}.py")
        return len(left) == 1 and part in defined(folder / "__init__.py")
    return True


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_what_pages_name_in_the_code_is_there(page):
    text = page.read_text()
    for dotted in re.findall(r"(?<![\w/.])jspeed(?:\.\w+)+", text):
        assert dotted == "jspeed.yaml" or exists(dotted), dotted
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"`make ([a-z-]+)", text)) <= targets
    for benches in re.findall(r"bench\.py ([a-z|]+)", text):
        assert set(benches.split("|")) <= BENCHES.keys(), benches


def test_words_that_had_to_be_guessed():
    """Texts that readers see, and not the changelog, which tells of them."""
    views = (ROOT / "python/jspeed").rglob("*.html")
    for page in [*(page for page in PAGES if page.name != "CHANGELOG.md"), *views]:
        found = re.findall(
            r"\b(?:raced|hindrances?|multipliers|queue empty|held up by)\b", page.read_text()
        )
        assert not found, f"{page}: {found}"


def test_names_that_are_not_there_are_noticed():
    """The first is what benchmarks/gpu.md once named: its formula had moved to another module."""
    assert not exists("jspeed.recipe.flops_per_token")
    assert exists("jspeed.record.sizes.flops_per_token")
    assert exists("jspeed.model") and exists("jspeed.data.shard") and not exists("jspeed.models")
