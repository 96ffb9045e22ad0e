"""Meshes: which axis orders and sizes are refused, and what the error message quotes."""

import jax
import pytest

from jspeed.errors import BadInput
from jspeed.parallel import mesh as meshes
from jspeed.parallel.mesh import make_mesh, parse_mesh


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
    with pytest.raises(
        BadInput, match=f"--mesh {text}: .* the first axis must be 'data'; give --mesh {better}"
    ):
        make_mesh(parse_mesh(text))
    assert make_mesh(parse_mesh(better)).size == 8


def test_a_size_that_is_left_open_is_quoted_as_it_was_given():
    with pytest.raises(
        BadInput, match="--mesh data=-1,model=2 needs a multiple of 2 devices but JAX has 1 "
    ):
        make_mesh(parse_mesh("data=-1,model=2"), jax.devices()[:1])
    with pytest.raises(BadInput, match="asks for 999999999 devices"):
        parse_mesh("data=-1,model=999999999")
