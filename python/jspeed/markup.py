"""HTML of pages that open from disk: the page itself, sections, tables; everything that is text is escaped."""

import base64
import hashlib
import re
from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

NONE = "-"
DIGITS = re.compile(r"(under )?[-+]?[\d,.]+(e[-+]?\d+)?( (to [\d,.]+|x [\d,.]+|[kMG]?B|ms|%))*")

STYLE = """
:root { color-scheme: light dark; --ink: #1d1d1f; --dim: #5f6368; --line: #d9dce0; --page: #fff; --card: #f5f6f8;
  --link: #0060a0; --bad: #b3261e; --good: #16693a; }
@media (prefers-color-scheme: dark) { :root { --ink: #e8eaed; --dim: #a3a9b1; --line: #3c4046; --page: #15171a;
  --card: #1f2227; --link: #7cc0f5; --bad: #ff8a80; --good: #7fd6a0; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1.2rem 1rem 3rem; max-width: 76rem; background: var(--page); color: var(--ink);
  font: 1rem/1.5 system-ui, sans-serif; overflow-wrap: anywhere; }
h1 { font-size: 1.5rem; line-height: 1.25; margin: 0 0 .2rem; }
h2 { font-size: 1.1rem; margin: 2.2rem 0 .5rem; }
p { margin: .3rem 0; }
a { color: var(--link); }
.dim { color: var(--dim); }
.bad { color: var(--bad); font-weight: 600; }
.good { color: var(--good); font-weight: 600; }
dl { display: grid; grid-template-columns: repeat(auto-fill, minmax(10rem, 1fr)); gap: .6rem; margin: 1rem 0; }
dl div { background: var(--card); border-radius: .5rem; padding: .5rem .7rem; }
dt { color: var(--dim); font-size: .8rem; }
dd { margin: 0; font-size: 1.05rem; font-variant-numeric: tabular-nums; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: .9rem; font-variant-numeric: tabular-nums; overflow-wrap: normal; }
th, td { text-align: left; padding: .25rem .9rem .25rem 0; border-bottom: 1px solid var(--line); vertical-align: top; }
th { color: var(--dim); font-weight: 500; vertical-align: bottom; }
.n { text-align: right; }
td.n, td.t { white-space: nowrap; }
.l { min-width: 12rem; }
figure { margin: 1rem 0; }
svg { display: block; width: 100%; max-width: 38rem; height: auto; color: var(--ink); }
"""


def page(title: str, body: Sequence[str], style: str = "", script: str = "") -> str:
    """Return a whole page that loads nothing and runs nothing but ``script``.

    ``title`` is text, ``body`` are parts in HTML; ``style`` is added to the common one.
    """
    # Nothing is fetched, and nothing else runs, whatever a recipe is called.
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    runs = f"; script-src 'sha256-{digest}'" if script else ""
    policy = f"default-src 'none'; style-src 'unsafe-inline'{runs}"
    return "\n".join(
        [
            '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
            f"<title>{text(title)}</title>\n<style>{STYLE}{style}</style>\n</head>\n<body>\n<main>",
            f"<h1>{text(title)}</h1>",
            *body,
            "</main>",
            *([f"<script>{script}</script>"] if script else []),
            "</body>\n</html>\n",
        ]
    )


def section(title: str, body: str, note: str = "") -> str:
    """Return ``body`` (HTML) under a title and a note, or nothing for no body."""
    if not body:
        return ""
    below = f'<p class="dim">{text(note)}</p>' if note else ""
    return f"<section><h2>{text(title)}</h2>{below}{body}</section>\n"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return an escaped table, its numbers to the right, or nothing for no rows."""
    rows = list(rows)
    if not rows:
        return ""
    columns = list(zip(*rows, strict=True))
    kinds = [_kind(column) for column in columns]

    def line(tag: str, cells: Iterable[str]) -> str:
        return "".join(f'<{tag} class="{kind}">{_cell(cell)}</{tag}>' for cell, kind in zip(cells, kinds, strict=True))

    body = "".join(f"<tr>{line('td', row)}</tr>\n" for row in rows)
    # A region that scrolls must be reachable by keyboard.
    return f'<div class="wide" tabindex="0"><table><thead><tr>{line("th", head)}</tr></thead>\n{body}</table></div>'


def _kind(column: Sequence[str]) -> str:
    """The class of a column: n for numbers, l for long words, t for others."""
    if all(cell in (NONE, "") or DIGITS.fullmatch(cell) for cell in column):
        return "n"
    return "l" if any(len(cell) > 40 for cell in column) else "t"


def _cell(words: str) -> str:
    """Text; an address of the web at its start becomes a link."""
    if found := re.match(r"https://[^\s<>\"']+", words):
        return f'<a href="{text(found[0])}">{text(found[0])}</a>{text(words[found.end() :])}'
    return text(words)


def text(value: Any) -> str:
    """Return ``value`` as text that is only ever text."""
    return escape(printable(value))


def printable(value: Any, most: int | None = None) -> str:
    """Return ``value`` without the control characters that XML does not allow, cut after ``most`` characters."""
    clean = "".join(character if character.isprintable() else " " for character in str(value))
    return clean if most is None or len(clean) <= most else f"{clean[: most - 1]}\N{HORIZONTAL ELLIPSIS}"
