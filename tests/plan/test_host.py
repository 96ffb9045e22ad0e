"""Tables in the host's memory in a plan: seconds by hand, ``--host``, and where they do not fit."""

import io
from dataclasses import replace

import jax
import pytest
from rich.console import Console

from jspeed.errors import BadInput
from jspeed.fields import check_json
from jspeed.parallel.mesh import make_mesh
from jspeed.plan.compile import TargetPlacement
from jspeed.plan.host import cost
from jspeed.plan.host.choose import choose, memory_of
from jspeed.plan.make import make_plan
from jspeed.plan.schema import Plan
from jspeed.plan.target import parse_target
from jspeed.plan.views import terminal
from jspeed.recipe import Recipe
from jspeed.run.compute.device import Device
from jspeed.run.compute.division import place
from jspeed.run.compute.host_tables import tables_on_host
from jspeed.run.find_recipe import find

from ..refusals import refused
from ..toys import TOYS

ONE = parse_target("h100x1")
R92 = find("r92", trace=False)


def placed(recipe: Recipe, memory: int = ONE.usable_bytes) -> TargetPlacement:
    """One device of this CPU in the place of an H100."""
    device = Device("gpu", "xla", "emulated", 65_536, memory)
    mesh = make_mesh({"data": 1}, jax.devices()[:1])
    return TargetPlacement(cluster=ONE, **vars(place(recipe, mesh, "zero1", device)))


def test_seconds_of_a_step_by_hand(monkeypatch):
    """Two look-ups for each of 8 x 16,384 tokens, rows of 768 numbers of 2 bytes: 402,653,184 bytes
    each way. Stage 1 updates every second step."""
    for name, value in {
        "GATHER": 1e9,
        "UPDATE": 0.5e9,
        "AGAIN": 0.25,
        "BOTH": 0.2,
        "ASKED": 25e6,
    }.items():
        monkeypatch.setattr(cost, name, value)
    recipe, moved = tables_on_host(R92.recipe), 402_653_184
    host = cost.Host(cores=4, memory_bytes=1e12, link_bytes_per_second=16e9)
    first, second = (
        cost.exchange(recipe, recipe.stages[0], phase, 8 * 16_384, host, 1, 0.120)
        for phase in (0, 1)
    )
    assert first["rows"] == 262_144 and first["bytes_each_way"] == moved
    assert first["gather_ms"] == pytest.approx(1e3 * moved / 4e9) == pytest.approx(100.66, abs=0.01)
    assert first["copied_ms"] == pytest.approx(1e3 * moved / 16e9) == pytest.approx(25.17, abs=0.01)
    # 100.66 + 25.17 ms run beside 120 ms of computing
    assert first["update_ms"] == 0
    assert first["exposed_ms"] == pytest.approx(5.83, abs=0.01)
    hidden = cost.exchange(recipe, recipe.stages[0], 0, 8 * 16_384, host, 1, 0.2)
    assert hidden["exposed_ms"] == 0
    # the gradients of two steps: 805,306,368 bytes at 4 x 0.5 GB/s, of which a fifth are of rows
    # that this step and the next one name; so is a quarter of the next one's rows
    assert second["update_ms"] == pytest.approx(402.65, abs=0.01)
    later = 80.53 + 25.17
    beside = 322.12 + 75.50 - 120
    assert second["exposed_ms"] == pytest.approx(beside + 25.17 + later + 25.17, abs=0.05)
    # eight devices have a link each
    eight = cost.exchange(recipe, recipe.stages[0], 0, 8 * 16_384, host, 8, 0.120)
    assert eight["copied_ms"] == pytest.approx(25.17 / 8, abs=0.01)
    # and are of two hosts, each of which has half of the work
    two = cost.exchange(recipe, recipe.stages[0], 0, 8 * 16_384, host._replace(nodes=2), 8, 0.120)
    assert two["copied_ms"] == pytest.approx(25.17 / 8, abs=0.01)
    assert two["gather_ms"] == pytest.approx(100.66 / 2, abs=0.01)
    # but each looks for its own rows among all 262,144
    assert first["asked_ms"] == eight["asked_ms"] == 0
    assert two["asked_ms"] == pytest.approx(10.49, abs=0.01)
    waits = 100.66 / 2 + 25.17 / 8 + 10.49 - 40
    short = cost.exchange(recipe, recipe.stages[0], 0, 8 * 16_384, host._replace(nodes=2), 8, 0.040)
    assert short["exposed_ms"] == pytest.approx(waits, abs=0.05)


def test_updates_come_as_often_as_the_stage_says():
    recipe = tables_on_host(R92.recipe)
    host = cost.host_of(ONE)
    due = [
        [
            cost.exchange(recipe, stage, phase, 8, host, 1, 1.0)["update_ms"] > 0
            for phase in range(4)
        ]
        for stage in recipe.stages
    ]
    assert due[0] == due[1] == [False, True, False, True] and due[2] == [False, False, False, True]


def test_the_host_of_a_target_and_what_is_asked_of_it():
    usual = cost.host_of(ONE)
    assert usual == (26, 242e9, 50e9, 1)
    assert cost.host_of(ONE, "cores=16,memory=128") == (16, 128e9, 50e9, 1)
    assert cost.host_of(parse_target("h100x8")) == (208, 1936e9, 50e9, 1)  # of all eight
    assert cost.host_of(parse_target("h100x8x2")) == (208, 1936e9, 50e9, 2)
    assert cost.host_of(parse_target("v6ex8")) is None
    assert cost.host_of(parse_target("v6ex8"), "cores=8,memory=64,link=10") == (8, 64e9, 10e9, 1)


@pytest.mark.parametrize(
    ("target", "asked", "words"),
    [
        ("h100x1", "cores=16,ram=128", "'ram=128' is not cores, memory"),
        ("h100x1", "cores=0", "'cores=0'"),
        ("h100x1", "memory=much", "'memory=much'"),
        ("h100x1", "memory=inf", "'memory=inf'"),
        ("h100x1", "", "write for example cores=16,memory=128,link=50"),
        ("v6ex8", "cores=16,memory=128", "nothing is known of the host of v6e"),
    ],
)
def test_a_host_that_cannot_be(target, asked, words):
    assert words in refused("--host", cost.host_of, parse_target(target), asked)


def test_a_table_goes_to_the_host_where_the_device_has_no_room():
    moved, placement = choose(R92, ONE, None, placed)
    assert set(moved.recipe.on_host) == {"ngrams"} and placement.host == cost.host_of(ONE)
    kept, placement = choose(R92, ONE, None, lambda recipe: placed(recipe, 10**12))
    assert kept is R92 and placement.host is None
    two = parse_target("h100x8x2")
    assert choose(R92, two, None, placed)[1].host == cost.host_of(two)
    other = find("r29", [])
    assert choose(other, ONE, None, placed)[1].host is None
    refused("--host cores=8 would have no effect", choose, other, ONE, "cores=8", placed)


def test_a_table_goes_where_it_is_asked_to():
    large = lambda recipe: placed(recipe, 10**12)  # noqa: E731
    assert choose(R92, ONE, None, large, "host")[1].host == cost.host_of(ONE)
    assert choose(R92, ONE, None, placed, "device")[1].host is None
    refused("--table hots: expected device or host", choose, R92, ONE, None, placed, "hots")
    refused("--host cores=8 would have no", choose, R92, ONE, "cores=8", placed, "device")
    for other, cluster in ((find("r29", []), ONE), (R92, parse_target("v6ex8"))):
        refused("--table host: ", choose, other, cluster, None, large, "host")


def test_the_memory_of_the_host():
    """84,602,880 rows of 1,552 bytes; 3 + 4 times the rows of a step, 1,207,959,552 bytes."""
    moved, placement = choose(R92, ONE, "memory=128", placed)
    said = memory_of(moved.recipe, placement.host, 0.25)
    assert said["table_bytes"] == 84_602_880 * 1552
    assert said["buffer_bytes"] == 7 * 1_207_959_552
    assert said["share"] == 0.9 and said["exposed"] == 0.25  # 0.9 x 131.3 GB beside 8.5 of 128


def test_a_host_that_is_too_small_is_said_with_the_rows_that_fit():
    said = refused("", choose, R92, ONE, "memory=64", placed)
    assert "nor do its tables fit the host: half of the rows of ngrams take 65.7 GB" in said
    # a quarter: 32.8 GB beside 8.5
    assert "--set NGRAMS=21150720, which is another model" in said.partition("nor do")[2]
    fewer = find("r92", ["NGRAMS=21150720"])
    with pytest.raises(BadInput, match="fit h100x1"):  # then the device holds it
        choose(fewer, ONE, "memory=64", placed)


@pytest.mark.slow
def test_a_whole_plan_with_a_table_on_the_host():
    """The seconds that nothing hides are in the stages, the terms and the sum of the run."""
    loaded = find("r92", TOYS["r92"])
    moved = replace(loaded, recipe=tables_on_host(loaded.recipe))
    host = cost.Host(cores=2, memory_bytes=64e9, link_bytes_per_second=25e9)
    made = make_plan(moved, replace(placed(moved.recipe), host=host))
    check_json(made, Plan)
    exposed = sum(stage["steps"] * stage["host"]["exposed_ms"] / 1e3 for stage in made["stages"])
    [term] = [row for row in made["terms"] if row["term"] == "table on the host"]
    assert term["seconds"] == pytest.approx(exposed) and term["guessed"] == term["share"] > 0
    assert made["host"]["exposed"] == pytest.approx(exposed / made["expected_seconds"])
    assert sum(row["seconds"] for row in made["terms"]) == pytest.approx(made["expected_seconds"])
    for stage in made["stages"]:
        of_device = stage["roofline_ms"] + stage["time_ms"]["empty_blocks"]
        assert stage["expected_ms"] == pytest.approx(of_device + stage["host"]["exposed_ms"])
    out = io.StringIO()
    terminal.print_plan(made, Console(file=out, width=200), whole=True)
    assert "on the host: tables of" in out.getvalue() and "table on the host" in out.getvalue()
