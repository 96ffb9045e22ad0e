"""HLO parser on text that XLA makes here for eight virtual CPU devices, and on notation of its GPU
texts."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jspeed.parallel.mesh import make_mesh
from jspeed.plan import hlo


@pytest.fixture(scope="module")
def step() -> str:
    """A loop of matmuls, a sum over rows that lie on eight devices, an in-place update."""
    mesh = make_mesh({"data": 8})
    rows, whole = NamedSharding(mesh, PartitionSpec("data")), NamedSharding(mesh, PartitionSpec())

    def function(x: jax.Array, w: jax.Array) -> tuple[jax.Array, jax.Array]:
        y = jax.lax.fori_loop(0, 3, lambda _, y: jnp.tanh(y @ w), x)
        return jnp.sum(y, axis=0), jnp.sort(y, axis=-1)

    x = jax.ShapeDtypeStruct((256, 96), jnp.float32, sharding=rows)
    w = jax.ShapeDtypeStruct((96, 96), jnp.float32, sharding=whole)
    return jax.jit(function, out_shardings=(whole, rows)).lower(x, w).compile().as_text()


def test_every_instruction_is_read(step: str):
    read = hlo.instructions(step)
    assert len(read) == sum(" = " in line and line.startswith("  ") for line in step.splitlines())
    names = {instruction.name for instruction in read}
    assert len(names) == len(read)
    computations = {instruction.computation for instruction in read}
    for instruction in read:
        assert set(instruction.operands) <= names
        assert set(instruction.calls) <= computations
        assert f" {instruction.opcode}(" in step


def test_loop_bodies_run_and_fused_instructions_do_not(step: str):
    running = hlo.running(step)
    [loop] = [instruction for instruction in running if instruction.opcode == "while"]
    assert loop.computation == hlo.entry(step)
    assert [array.dtype for array in loop.arrays][:2] == ["s32", "f32"]
    reached = {instruction.computation for instruction in running}
    assert set(loop.calls) <= reached
    assert "tanh" not in {i.opcode for i in running if i.computation == hlo.entry(step)}
    [tanh] = [i for i in hlo.instructions(step) if i.opcode == "tanh"]
    assert tanh.op_name.endswith("/tanh")
    assert tanh.source.startswith(f"{__file__}:")
    [sort] = [i for i in running if i.opcode == "sort"]
    assert not set(sort.calls) & reached  # a comparison, applied to elements


def test_collective(step: str):
    [collective] = hlo.collectives(step)
    assert collective.kind == "all-reduce"
    assert collective.arrays == (hlo.Array("f32", (96,)),)
    assert (collective.bytes, collective.group, collective.overlaps) == (96 * 4, 8, False)


def test_buffers_are_what_running_instructions_write(step: str):
    found = hlo.buffers(step, 32 * 96 * 4)
    assert found
    assert all(buffer.array.bytes >= 32 * 96 * 4 for buffer in found)
    assert "parameter" not in {buffer.instruction.opcode for buffer in found}
    assert list(found) == sorted(found, key=lambda buffer: -buffer.array.bytes)
    assert hlo.Array("f32", (32, 96)) in {buffer.array for buffer in found}  # a device's rows


def test_collectives_of_subgroups_and_permutes():
    mesh = make_mesh({"data": 4, "model": 2})

    def function(x: jax.Array) -> jax.Array:
        whole = jax.lax.all_gather(x, "model", tiled=True)
        part = jax.lax.psum_scatter(whole, "data", tiled=True)
        return jax.lax.ppermute(part, "data", [(0, 1), (1, 2)])

    both = PartitionSpec(("data", "model"))
    mapped = jax.shard_map(function, mesh=mesh, in_specs=both, out_specs=both, check_vma=False)
    x = jax.ShapeDtypeStruct((64, 4), jnp.bfloat16, sharding=NamedSharding(mesh, both))
    found = {one.kind: one for one in hlo.collectives(jax.jit(mapped).lower(x).compile().as_text())}
    assert {kind: one.group for kind, one in found.items()} == {
        "all-gather": 2,
        "reduce-scatter": 4,
        "collective-permute": 3,
    }
    rows = {kind: one.arrays[0].dims[0] for kind, one in found.items()}
    assert rows == {"all-gather": 16, "reduce-scatter": 4, "collective-permute": 4}
    scatter = found["reduce-scatter"]
    assert scatter.bytes == 4 * sum(array.bytes for array in scatter.arrays)


@pytest.mark.parametrize(
    ("written", "members"),
    [
        ("{{0,1,2,3},{4,5,6,7}}", (0, 1, 2, 3)),
        ("[4,2]<=[8]", (0, 1)),
        ("[2,4]<=[4,2]T(1,0)", (0, 2, 4, 6)),
        ("[4,2]<=[2,2,2]T(0,2,1)", (0, 2)),
        ("mesh['data'=4,'model'=2] {'data'}", (0, 2, 4, 6)),
        ("mesh['data'=4,'model'=2] {'model'}", (0, 1)),
        ("mesh['data'=4,'model'=2] {'data','model'}", tuple(range(8))),
        ("mesh['data'=8] {'data':(2)4}", (0, 1, 2, 3)),
        ("mesh['data'=8] {'data':(1)4}", (0, 2, 4, 6)),
        ("{}", tuple(range(8))),
    ],
)
def test_replica_groups_in_all_notations(written: str, members: tuple[int, ...]):
    text = f"""HloModule jit_f, is_scheduled=true, num_partitions=8

ENTRY %main (p: bf16[4]) -> bf16[4] {{
  %p = bf16[4]{{0}} parameter(0)
  %a = bf16[4]{{0}} all-reduce-start(%p), channel_id=1, replica_groups={written}, \
backend_config={{"is_sync":false}}
  ROOT %d = bf16[4]{{0}} all-reduce-done(%a)
}}
"""
    [collective] = hlo.collectives(text)
    assert collective.members == members and collective.group == len(members)
    assert collective.overlaps


def test_starts_and_dones_are_one():
    text = """HloModule jit_f, is_scheduled=true, num_partitions=8

%wrapped (x: f8e4m3fn[16,4]) -> f8e4m3fn[2,4] {
  %x = f8e4m3fn[16,4]{1,0} parameter(0)
  ROOT %scatter = f8e4m3fn[2,4]{1,0} reduce-scatter(%x), replica_groups=[1,8]<=[8], to_apply=%add
}

ENTRY %main (p: f8e4m3fn[16,4]) -> (f8e4m3fn[2,4], bf16[32,4]) {
  %p = f8e4m3fn[16,4]{1,0} parameter(0)
  %start = ((f8e4m3fn[16,4]{1,0}), f8e4m3fn[2,4]{1,0}, u32[]) async-start(%p), calls=%wrapped
  %q = bf16[4,4]{1,0} custom-call(%p, /*index=1*/%p), custom_call_target="k(", \
metadata={op_name="a)" stack_frame_id=9}
  %gather = (bf16[4,4]{1,0}, bf16[32,4]{1,0}) all-gather-start(%q), replica_groups={}, \
backend_config={"is_sync":true}
  %update = ((f8e4m3fn[16,4]{1,0}), f8e4m3fn[2,4]{1,0}, u32[]) async-update(%start)
  %done = f8e4m3fn[2,4]{1,0} async-done(%update)
  %gathered = bf16[32,4]{1,0} all-gather-done(%gather)
  ROOT %result = (f8e4m3fn[2,4]{1,0}, bf16[32,4]{1,0}) tuple(%done, %gathered)
}
"""
    scatter, gather = hlo.collectives(text)
    assert (scatter.kind, scatter.bytes, scatter.overlaps) == ("reduce-scatter", 64, True)
    assert (gather.kind, gather.bytes, gather.overlaps) == ("all-gather", 256, False)
    [call] = [step for step in hlo.instructions(text) if step.opcode == "custom-call"]
    assert (call.target, call.op_name, call.source, call.operands) == ("k(", "a)", "", ("p", "p"))
    written = [(buffer.instruction.opcode, buffer.array.bytes) for buffer in hlo.buffers(text)]
    assert written == [("all-gather", 256), ("custom-call", 32), ("reduce-scatter", 8)]


@pytest.mark.parametrize(
    "array, size",
    [
        (hlo.Array("bf16", (3, 5)), 30),
        (hlo.Array("pred", (7,)), 7),
        (hlo.Array("f8e5m2", (7,)), 7),
        (hlo.Array("s4", (7,)), 4),
        (hlo.Array("c64", ()), 8),
        (hlo.Array("token", ()), 0),
        (hlo.Array("f32", (0, 9)), 0),
    ],
)
def test_bytes(array: hlo.Array, size: int):
    assert array.bytes == size


def test_other_text_is_refused():
    with pytest.raises(ValueError, match="not the text of an HLO module"):
        hlo.running("def f(): pass")


@pytest.mark.parametrize(
    ("axis", "pairs"), [("pipe", [(0, 1), (1, 2), (2, 3)]), ("data", [(0, 1), (1, 0)])]
)
def test_a_permute_is_named_after_the_axis_it_runs_along(axis: str, pairs: list[tuple[int, int]]):
    mesh = make_mesh({"data": 2, "pipe": 4})
    both = PartitionSpec(("data", "pipe"))
    mapped = jax.shard_map(
        lambda x: jax.lax.ppermute(x, axis, pairs), mesh=mesh, in_specs=both, out_specs=both
    )
    x = jax.ShapeDtypeStruct((64, 4), jnp.float32, sharding=NamedSharding(mesh, both))
    [permute] = hlo.collectives(jax.jit(mapped).lower(x).compile().as_text())
    assert (permute.along(dict(mesh.shape)), permute.group) == ((axis,), mesh.shape[axis])
