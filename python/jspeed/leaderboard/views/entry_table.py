"""The table of a track on the page: a row of numbers for every entry, and under it what opens on a click or a key."""

from collections.abc import Mapping
from typing import Any

from jspeed.leaderboard import as_text
from jspeed.leaderboard.compare import change_lines, changes
from jspeed.markup import text

Entry = Mapping[str, Any]
SHOWN = 60  # entries of a track on the page
RUNS = 30  # runs of an entry on the page
VALID = {True: ("good", "\N{CHECK MARK} yes"), False: ("bad", "\N{BALLOT X} no")}
BETTER = {
    "yes": ("good", "\N{CHECK MARK} yes"),
    "no": ("bad", "\N{BALLOT X} no"),
    "not shown": ("", "? not shown"),
    None: ("dim", as_text.NONE),
}

HOW = {"in turn": "run in turn on one machine", "apart": "not run in turn"}

# name, class of the column, whether its cells are numbers
COLUMNS = (
    ("#", "", True), ("recipe", "", False), ("time", "", True), ("sd", "wide-only", True), ("loss", "", True),
    ("n", "wide-only", True), ("steps", "wide-only", True), ("valid", "", False), ("better", "", False),
    ("date", "wide-only", False),
)  # fmt: skip


def table(track: Mapping[str, Any], sources: Mapping[str, str], diff_budget: list[int]) -> str:
    """Return the entries: a row of numbers each, and under it a line that opens."""
    if not track["entries"]:
        return "<p>No runs yet.</p>\n"
    head = "".join(
        f'<th scope="col" class="{kind}{" n" * number}"><button type="button">{name}</button></th>'
        for name, kind, number in COLUMNS
    )
    bodies = "".join(entry_rows(entry, sources, diff_budget) for entry in track["entries"][:SHOWN])
    more = len(track["entries"]) - SHOWN
    rest = f'<p class="dim">{more:,} more entries are in leaderboard.json.</p>' if more > 0 else ""
    title = f"Recipes on {track['track']}; the heads sort"
    return (
        f'<div class="wide" tabindex="0" role="region" aria-label="{text(title)}"><table class="board"><caption>'
        f"{text(title)}</caption><thead><tr>{head}</tr></thead>\n{bodies}</table></div>{rest}\n"
    )


def entry_rows(entry: Entry, sources: Mapping[str, str], diff_budget: list[int]) -> str:
    """Return one entry's two rows."""
    found, mean = entry["seconds"], entry["loss"] and entry["loss"]["mean"]
    sd = found and found["sd"]
    valid = VALID[entry["valid"]]
    better = BETTER[entry["better"] and entry["better"]["verdict"]]
    values: list[tuple[Any, str, str]] = [
        (entry["rank"], str(entry["rank"] or as_text.NONE), ""),
        (entry["recipe"], entry["recipe"], ""),
        (found and found["mean"], as_text.seconds(found and found["mean"]), ""),
        (sd, as_text.NONE if sd is None else f"{sd:.2g}", ""),
        (mean, as_text.loss(mean), ""),
        (entry["loss"] and entry["loss"]["n"], str(entry["loss"]["n"] if entry["loss"] else 0), ""),
        (entry["steps"], f"{entry['steps']:,}", ""),
        (valid[1], valid[1], valid[0]),
        (better[1], better[1], better[0]),
        (entry["date"], entry["date"], ""),
    ]
    cells = []
    for (value, shown, mark), (name, kind, number) in zip(values, COLUMNS, strict=True):
        tag = 'th scope="row"' if name == "recipe" else "td"
        key = "" if value is None else f"{value:.6g}" if isinstance(value, float) else value
        cells.append(f'<{tag} class="{kind}{" n" * number} {mark}" data-v="{text(key)}">{text(shown)}</{tag[:2]}>')
    title = entry["card"].get("title", "").removeprefix(f"{entry['recipe']}:").strip()
    summary = text(title or f"recipe {entry['recipe_hash'][:12]}")
    if entry["why_not"]:
        summary += f' <span class="bad">{text(entry["why_not"][0])}</span>'
    return (
        f'<tbody id="{text(entry["id"])}"><tr>{"".join(cells)}</tr>\n<tr class="more"><td colspan="{len(COLUMNS)}">'
        f"<details><summary>{summary}</summary>{details(entry, sources, diff_budget)}</details></td></tr></tbody>\n"
    )


def details(entry: Entry, sources: Mapping[str, str], diff_budget: list[int]) -> str:
    """Return what opens: what it is, why it counts or does not, its runs, its difference to the parent."""
    parts = [f"<p>{text(entry['card']['what'])}</p>" if entry["card"].get("what") else ""]
    facts = [*entry["why_not"]]
    tests = [f"{name}-test {as_text.chance(entry['tests'][name]['p'])}" for name in ("t", "z") if entry["tests"][name]]
    facts += [", ".join(tests)] if tests else []
    if better := entry["better"]:
        facts.append(f"{as_text.ratio(better)} x the time of {better['parent']}, {HOW[better['how']]}")
        if better["pairwise"]:
            saved = f"with {better['steps_saved']:,} steps saved at {better['price_per_step'] or 0:.2g} nats each"
            facts.append(f"loss at as many steps: better with {as_text.chance(better['pairwise']['p'])}, {saved}")
    if entry["anchored"]:
        facts.append(f"on the track's hardware by that ratio: {as_text.seconds(entry['anchored']['seconds'])}")
    if entry["overrides"]:
        facts.append("with " + ", ".join(f"{name}={value}" for name, value in sorted(entry["overrides"].items())))
    facts.append(
        f"{as_text.devices(entry['devices'])}; {as_text.short(entry['parameters'])} parameters, "
        f"{as_text.short(entry['tokens'])} tokens, {as_text.short(entry['tokens'] * entry['flops_per_token'])} FLOPs; "
        f"compile {as_text.seconds(entry['compile_seconds'])}, wall {as_text.seconds(entry['wall_seconds'])}; jax "
        f"{entry['versions']['jax']}, commit {as_text.commit(entry['git'])}, recipe {entry['recipe_hash'][:12]}"
    )
    parts.append("<ul>" + "".join(f"<li>{text(fact)}</li>" for fact in facts) + "</ul>")
    rows = "".join(
        f'<tr><td class="n">{run["seed"]}</td><td class="n">{as_text.loss(run["val_loss"])}</td><td class="n">'
        f"{as_text.seconds(run['timed_seconds'])}</td><td>{text(run['status'])}</td>"
        f"<td>{text(run['started'][:16].replace('T', ' '))}</td></tr>"
        for run in entry["runs"][:RUNS]
    )
    hidden = len(entry["runs"]) - RUNS
    more = f'<p class="dim">{hidden:,} more runs are in leaderboard.json.</p>' if hidden > 0 else ""
    parts.append(
        '<table class="runs"><thead><tr><th scope="col" class="n">seed</th><th scope="col" class="n">loss</th>'
        '<th scope="col" class="n">time</th><th scope="col">status</th><th scope="col">started</th></tr></thead><tbody>'
        f"{rows}</tbody></table>{more}"
    )
    return "".join(parts) + difference(entry, sources, diff_budget)


def difference(entry: Entry, sources: Mapping[str, str], diff_budget: list[int]) -> str:
    """Return the difference to the parent's source, and the diff itself while ``diff_budget`` has bytes left."""
    better = entry["better"]
    mine, theirs = (sources.get(sha or "") for sha in (entry["recipe_sha256"], better and better["parent_sha256"]))
    if not better or mine is None or theirs is None:
        return ""
    found = changes(mine, theirs)
    parts = "".join(f"<li>{text(said)}</li>" for said in change_lines(found))
    kinds = {"+": "add", "-": "del", "@": "at"}
    lines = "\n".join(
        f'<span class="{kinds[row[0]]}">{text(row)}</span>' if row[:1] in kinds else text(row) for row in found["diff"]
    )
    diff_budget[0] -= len(lines)
    shown = (
        f'<pre tabindex="0" role="region" aria-label="Diff to {text(better["parent"])}">{lines}</pre>'
        if diff_budget[0] >= 0
        else f"<p>The diff is long: leaderboard.py compare {text(entry['recipe'])} {text(better['parent'])}</p>"
    )
    return f"<h3>Against {text(better['parent'])}</h3><ul>{parts}</ul>{shown}"
