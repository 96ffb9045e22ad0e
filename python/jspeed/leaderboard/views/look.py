"""How the page looks, beyond what all pages share, and the script that sorts its tables."""

STYLE = """
:root { --c0: #0060a8; --c1: #b34700; --c2: #00734f; --c3: #a3366f; --c4: #7a5b00; --c5: #4b4fae; --soft: #c9d7e6; }
@media (prefers-color-scheme: dark) { :root { --c0: #6cb6ff; --c1: #ff9d5c; --c2: #4fd1a5; --c3: #f08fc0;
  --c4: #e3c05a; --c5: #a9adff; --soft: #2f4257; } }
h2 { font-size: 1.25rem; margin-top: 2.6rem; padding-top: .6rem; border-top: 1px solid var(--line); }
h2 small { color: var(--dim); font-weight: 400; font-size: .85rem; }
h3 { font-size: 1rem; margin: .8rem 0 .2rem; }
nav ul { display: flex; flex-wrap: wrap; gap: .4rem 1rem; list-style: none; padding: 0; margin: .8rem 0 0; }
:focus-visible { outline: 2px solid var(--link); outline-offset: 2px; border-radius: .2rem; }
dl.words { display: block; }
dl.words dt { font-size: .9rem; margin-top: .5rem; color: var(--ink); font-weight: 600; }
dl.words dd { font-size: .95rem; max-width: 48rem; }
#clock p, .more p { max-width: 48rem; }
.figures { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(26rem, 100%), 1fr)); gap: 1rem 2rem;
  align-items: start; }
figure { margin: .4rem 0; max-width: 29rem; }
figcaption { font-weight: 600; font-size: .9rem; margin-bottom: .2rem; }
svg text { font: 10.5px system-ui, sans-serif; fill: var(--ink); font-variant-numeric: tabular-nums; }
svg .dim { fill: var(--dim); font-weight: 400; }
svg path { fill: none; }
svg .grid { stroke: var(--line); stroke-width: .7; }
svg .axis { stroke: var(--dim); stroke-width: .8; }
svg .line { stroke-width: 1.8; stroke-linejoin: round; }
svg .ours, svg .c0 { stroke: var(--c0); } svg .c1 { stroke: var(--c1); } svg .c2 { stroke: var(--c2); }
svg .c3 { stroke: var(--c3); } svg .c4 { stroke: var(--c4); } svg .c5 { stroke: var(--c5); }
svg .reference { stroke: var(--dim); stroke-dasharray: 4 2.5; }
svg .target { stroke: var(--bad); stroke-width: 1.2; stroke-dasharray: 5 3; }
svg .mean { stroke: var(--ink); stroke-width: 2; }
svg .dot { fill: var(--c0); fill-opacity: .65; }
svg .bar { fill: var(--c0); } svg .saved { fill: var(--soft); } svg .lost { fill: var(--bad); }
table.board { width: 100%; border-collapse: collapse; }
caption { position: absolute; width: 1px; height: 1px; overflow: hidden; clip-path: inset(50%); }
.board > thead th { padding: 0; border-bottom: 1px solid var(--dim); white-space: nowrap; }
.board button { font: inherit; color: inherit; background: none; border: 0; padding: .5rem .9rem .4rem 0;
  min-height: 2.2rem; min-width: 1.6rem; text-align: inherit; cursor: pointer; }
.board button:hover { color: var(--ink); text-decoration: underline; }
.board th[aria-sort] button::after { content: " \\2195"; }
.board th[aria-sort=ascending] button::after { content: " \\2191"; }
.board th[aria-sort=descending] button::after { content: " \\2193"; }
.board th[scope=row] { color: var(--ink); font-weight: 600; vertical-align: top; overflow-wrap: anywhere;
  min-width: 7rem; }
.board tbody > tr:first-child > * { border-bottom: 0; padding-top: .6rem; }
.board td.good, .board td.bad { white-space: nowrap; }
.more > td { padding-bottom: .5rem; white-space: normal; }
.more details > * { contain: inline-size; }
.more ul { margin: .4rem 0; padding-left: 1.2rem; }
.more li { max-width: 60rem; overflow-wrap: anywhere; }
summary { cursor: pointer; color: var(--dim); padding: .25rem 0; }
summary:hover { color: var(--ink); }
.rules { margin-top: 1rem; }
.runs { margin: .4rem 0; }
pre { background: var(--card); border-radius: .5rem; padding: .7rem; overflow: auto; max-height: 28rem;
  font-size: .8rem; line-height: 1.45; overflow-wrap: normal; }
.add { color: var(--good); } .del { color: var(--bad); } .at { color: var(--dim); }
@media (max-width: 40rem) { .wide-only { display: none; } body { padding: 1rem .8rem 2rem; }
  th, td { padding-right: .5rem; } .board { font-size: .85rem; } .board button { padding-right: .5rem; }
  .board th[scope=row] { min-width: 5rem; } }
"""

# A table's rows are groups (tbody), so that an entry's second row follows its first. Empty values stay last.
SCRIPT = """
for (const table of document.querySelectorAll("table.board")) {
  const heads = [...table.tHead.rows[0].cells];
  heads.forEach((head, column) => head.querySelector("button").addEventListener("click", () => {
    const down = head.getAttribute("aria-sort") === "ascending";
    heads.forEach(other => other.removeAttribute("aria-sort"));
    head.setAttribute("aria-sort", down ? "descending" : "ascending");
    const number = head.classList.contains("n"), sign = down ? -1 : 1;
    const key = body => body.rows[0].cells[column].dataset.v;
    const order = (a, b) => number ? a - b : a.localeCompare(b);
    [...table.tBodies]
      .sort((a, b) => (key(a) === "") - (key(b) === "") || sign * order(key(a), key(b)))
      .forEach(body => table.append(body));
  }));
}
"""
