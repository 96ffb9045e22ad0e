"""The HTML report and the plot are complete and deterministic, whatever fields a plan lacks."""

import copy
from pathlib import Path

import pytest

from jspeed.plan.views import tables
from jspeed.plan.views.plot import write_svg
from jspeed.plan.views.terminal import write_html

from ..markup import Reader, texts_of

MARKUP = """<script>alert("1")</script> & 'r29' $x$ <b>\x00"""
STAGE = {
    "name": "stage 1",
    "steps": 557,
    "tokens_per_step": 393_216,
    "micro_batches": 2,
    "micro_batch_tokens": 24_576,
    "compiled": True,
    "memory_bytes": {"arguments": 400_000_000, "temporaries": 21_000_000_000, "peak":
    21_500_000_000},
    "memory_by_kind": {"parameters": 137_000_000, "batch": 100_000, "activations and workspace":
    20_800_000_000},
    "largest_buffers": [
        {"bytes": 4_945_084_416, "dtype": "bf16", "dims": [49_152, 50_304], "source":
        "losses.py:88", "op": ""}
    ],
    "flops": 9.1e13,
    "flops_by_dtype": {"f8": 3.4e13, "bf16": 5.7e13},
    "flops_by_part": {"mlp": 2.1e13, "head": 3.4e13},
    "bytes_moved": 1.4e11,
    "kernels": {"fp8_matmul": 3, "matmul": 260, "attention_forward": 11},
    "collectives": [
        {"kind": "all-gather", "bytes": 77_266_944, "axis": "data", "group": 8, "async": True,
        "count": 2,
         "dtype": "bf16", "ms": 0.75, "compute_ms_between": 0.5, "exposed_ms": 0.25, "source":
         "layout.py:179"}
    ],
    "time_ms": {"compute": 52.0, "memory": 24.0, "communication": 6.1, "exposed_communication":
    1.9, "launches": 0.2,
                "empty_blocks": 5.0},
    "host": None,
    "predicted_ms": [68.0, 97.0],
}  # fmt: skip
PLAN = {
    "recipe": "r29",
    "recipe_hash": "1d735ec3",
    "sets": ["LANES=8"],
    "target": "h100x8",
    "device_kind": "NVIDIA H100",
    "devices": 8,
    "nodes": 1,
    "mesh": {"data": 8},
    "layout": "zero1",
    "parameters": 275_742_048,
    "device_memory_bytes": 84_942_979_072,
    "memory_limit_bytes": 78_150_000_000,
    "fits": True,
    "fit": "fits: 21.5 of 79.0 GB a device",
    "facts": {
        "hbm_bytes_per_second": 3.35e12,
        "sources": {"hbm_bytes_per_second": "https://example.org/h100?a=1&b=2 (dense)"},
    },
    "constants": [{"name": "matmul", "value": 0.65, "source": "guess"}],
    "calibration": [
        {"recipe": "track3", "measured_ms": 155.0, "predicted_ms": [120.0, 170.0], "used_to_fit":
        False,
         "error": -0.06, "source": "track 3"}
    ],
    "stages": [STAGE, STAGE | {"name": "stage 2", "predicted_ms": [71.0, 101.0]}],
    "predicted_step_ms": [69.0, 99.0],
    "predicted_seconds": [115.0, 165.0],
    "expected_seconds": 140.0,
    "terms": [{"term": "attention", "seconds": 28.0, "share": 0.2, "guessed": 0.05}],
    "guessed": 0.05,
    "bottlenecks": [],
    "host": None,
    "predicted_cost": {"currency": "USD", "per_device_hour": 3.0, "low": 0.77, "high": 1.1},
    "findings": [
        {"name": "redundant-matmul", "level": "error", "text": "8.00 times the FLOPs", "value":
        8.0, "threshold": None}
    ],
    "matmuls": [
        {"source": "r29.py:140", "name": "dot", "dtype": "bf16", "shape": [8, 4, 2], "count": 66,
        "flops": 2e12,
         "redundancy": 8.0}
    ],
    "search": [
        {"layout": "zero1", "mesh": {"data": 8}, "micro_batch_tokens": 49_152, "peak_bytes": 1e9,
        "fits": False,
         "predicted_ms": [1.0, 2.0]}
    ],
    "warnings": ["no plan was built"],
    "bounds": ["memory"],
    "guesses": ["fractions"],
}  # fmt: skip


@pytest.fixture
def read(tmp_path: Path):
    """What writes a plan's page and reads it."""

    def written(plan) -> Reader:
        write_html(tmp_path / "plan.html", plan)
        return Reader((tmp_path / "plan.html").read_text())

    return written


def marked_up(value):
    """``value`` with every text in it, keys of the plan's own left alone, followed by markup."""
    if isinstance(value, dict):
        return {key: marked_up(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [marked_up(inner) for inner in value]
    return value + MARKUP if isinstance(value, str) else value


def test_the_picture_has_every_number_that_matters(tmp_path: Path) -> None:
    write_svg(tmp_path / "plan.svg", PLAN)
    texts = texts_of(tmp_path / "plan.svg")
    for expected in ("r29 on h100x8", "stage 1", "stage 2", "68 to 97 ms", "71 to 101 ms",
    "compute", "memory",
                     "exposed communication", "all communication", "JAX may take 78.15 GB", "peak \
21.50 GB",
                     "device 84.94 GB", "activations and workspace, 20.80 GB", "parameters, 0.14 \
GB"):  # fmt: skip
        assert expected in texts
    assert (tmp_path / "plan.svg").stat().st_size < 100_000


def test_the_page_has_all_tables_and_loads_nothing(read) -> None:
    found = read(PLAN)
    for expected in ("r29 on h100x8", "69.0 to 99.0 ms", "$0.77 to $1.10", "24,576 x 2", "49152 x \
50304",
                     "losses.py:88", "all-gather", "8.00 times the FLOPs", "-0.06", "r29.py:140",
                     "no plan was built",
                     "275,742,048", "under 0.1 %", "68 to 97", "84.94 GB", "71 to 101", "LANES=8",
                     "1d735ec3",
                     "https://example.org/h100?a=1&b=2 (dense)"):  # fmt: skip
        assert expected in found.text
    assert set(found.tags) <= {"html", "head", "meta", "style", "body", "pre", "code", "span"}
    assert {name for _, name, _ in found.attributes} <= {"charset", "style", "class"}


def test_markup_in_any_text_is_shown_as_text(read, tmp_path: Path) -> None:
    plan = marked_up(PLAN)
    plan["stages"][0]["kernels"] = {"<i>kernel": 1}
    plan["stages"][0]["memory_by_kind"] = {"<i>kind": 2e9}
    plan["facts"] = {
        "<i>fact": {"<i>rate": 1.0},
        "sources": {"<i>fact": 'https://x.org/"onclick="alert(1)'},
    }
    plan["mesh"] = {"<i>axis": 8}
    plan["findings"][0]["level"] = "error"
    plain, found = read(PLAN), read(plan)
    kinds = [{(tag, name) for tag, name, _ in page.attributes} for page in (found, plain)]
    assert set(found.tags) == set(plain.tags) and kinds[0] == kinds[1]
    for expected in (
        "r29<script>",
        "stage 1<script>",
        *"<i>kernel <i>kind <i>fact <i>axis <b>".split(),
    ):
        assert expected in found.text
    write_svg(tmp_path / "plan.svg", plan)
    assert any(
        text.startswith("r29<script>alert") and "$x$" in text and len(text) == 50
        for text in texts_of(tmp_path / "plan.svg")
    )


def test_stages_that_exchange_the_same_are_listed_once(read) -> None:
    other = STAGE | dict(
        name="stage 3", collectives=[STAGE["collectives"][0] | {"bytes": 5}], compiled=False
    )
    text = read(PLAN | {"stages": [*PLAN["stages"], other]}).text
    assert text.count("all-gather") == 2 and "stage 3 *" in text


def test_a_plan_beside_another(read) -> None:
    before = PLAN | dict(
        recipe="r21", stages=[STAGE | {"steps": 10, "flops": 1e12}], predicted_step_ms=[80, 90]
    )
    found = read(PLAN | {"against": before})
    for expected in ("r29 against r21 on h100x8", "predicted ms, low", "exposed communication ms"):
        assert expected in found.text


def test_the_same_plan_is_the_same_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import matplotlib

    before = copy.deepcopy(PLAN)
    for name, setting in (("a", 10), ("b", 23)):
        monkeypatch.setitem(matplotlib.rcParams, "font.size", setting)  # the user's own style
        write_svg(tmp_path / f"{name}.svg", PLAN)
        write_html(tmp_path / f"{name}.html", PLAN)
    for kind in ("svg", "html"):
        assert (tmp_path / f"a.{kind}").read_bytes() == (tmp_path / f"b.{kind}").read_bytes()
    assert before == PLAN and matplotlib.rcParams["font.size"] == 23


def test_no_search_and_no_table_of_it(read) -> None:
    text = read(
        {key: value for key, value in PLAN.items() if key != "search"} | {"findings": []}
    ).text
    assert "layouts and micro-batches tried" not in text


def test_numbers_as_text() -> None:
    assert tables.size(21.5e9) == "21.50 GB" and tables.size(98_306) == "98.3 kB"
    assert tables.number(12_345) == "12,345" and tables.number(3.35e12) == "3.35 T"
    assert tables.percent(0, 5) == "0 %" and tables.percent(1, 1e6) == "under 0.1 %"
    values = dict(
        a=None, b="", c=True, bytes=5, dims=[2, 3], predicted_ms=[1.0, 2.0], m={"data": 8}
    )
    assert [tables.text(*item) for item in values.items()] == [
        "-",
        "-",
        "yes",
        "0.005 kB",
        "2 x 3",
        "1 to 2",
        "data=8",
    ]
    assert tables.listing("", [{"a_b": "3.35 T", "c": "x"}, {"a_b": "1 to 2"}]).numeric == [
        True,
        False,
    ]


def test_a_finding_is_on_the_page_once(read):
    finding = dict(level="error", name="fp32-logits", text="2 arrays", value=2.0, threshold=0.0)
    warnings = ["fp32-logits: 2 arrays", "does not fit: 90 GB", "not measured"]
    text = read(PLAN | {"findings": [finding], "fit": warnings[1], "warnings": warnings}).text
    assert [text.count(part) for part in ("2 arrays", "does not fit: 90 GB", "not measured")] == [
        1,
        1,
        1,
    ]


def test_collectives_of_one_stage_say_nothing_of_others():
    """The terminal shows the last stage alone, whose collectives may be others."""
    note = "A stage that is not listed has the same collectives as one that is."
    assert tables.collectives({"stages": [STAGE]}).note == ""
    assert tables.collectives({"stages": [STAGE, STAGE | {"name": "stage 2"}]}).note == note
