"""Meshes: which axis orders and sizes are refused, and what the error message quotes."""

import jax
import pytest

from jspeed.parallel import mesh as meshes
from jspeed.parallel.layout import partitions
from jspeed.parallel.mesh import make_mesh, parse_mesh
from jspeed.run.find_recipe import find

from ..refusals import refused


@pytest.mark.parametrize(
    ("text", "better"),
    [
        ("pipe=2,data=4", "data=4,pipe=2"),
        ("model=2,data=4", "data=4,model=2"),
        ("model=2,data=-1", "data=4,model=2"),
    ],
)
def test_several_processes_need_data_as_the_first_axis(text, better, monkeypatch):
    """Each process loads neighbouring rows; with another axis outermost its devices need rows from
    elsewhere."""
    assert make_mesh(parse_mesh(text)).size == 8  # one process has all rows
    monkeypatch.setattr(meshes.processes, "count", lambda: 2)
    refused(f"--mesh {text}: .* must be 'data'; .* {better}", make_mesh, parse_mesh(text))
    assert make_mesh(parse_mesh(better)).size == 8


def test_a_size_that_is_left_open_is_quoted_as_it_was_given():
    refused("--mesh data=-1,model=2 ", make_mesh, parse_mesh("data=-1,model=2"), jax.devices()[:1])
    refused("asks for 999999999 devices", parse_mesh, "data=-1,model=999999999")


def test_tensor_parallel_splits_matrices_however_small():
    """What a matmul is split along is no matter of size; what is gathered for a step is."""
    recipe, mesh = find("microgpt-names").recipe, make_mesh({"data": 4, "model": 2})

    def tiles(layout):
        specs = partitions(recipe.parameters, layout, mesh)
        return {
            name: jax.NamedSharding(mesh, specs[name]).shard_shape(spec.shape)
            for name, spec in recipe.parameters.items()
        }

    tp = tiles("tp")
    assert {tp[name] for name in ("query", "key", "value")} == {(4, 64, 32)}
    assert tp["out"] == (4, 32, 64) and tp["up"] == (4, 64, 128) and tp["head"] == (14, 64)
    assert tiles("zero1")["query"] == (4, 64, 64) and tiles("dp")["up"] == (4, 64, 256)
