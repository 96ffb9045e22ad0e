"""Preflight: a backend that raises, returns NaN or is 1 % off is replaced by the next one."""

import dataclasses
import functools
import io
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console

from jspeed.base import compiler
from jspeed.errors import BadInput
from jspeed.kernels import CUSTOM as NAMES
from jspeed.kernels import attention_backends, own_value, pointer_attention
from jspeed.kernels.preflight import checks
from jspeed.kernels.preflight import fall_back as preflight
from jspeed.model import fp8
from jspeed.model.attention import attention, find_documents
from jspeed.model.custom_kernels import Kernel, Refused, Sizes, custom_kernel
from jspeed.parallel.mesh import make_mesh
from jspeed.run.compute import checked, device
from jspeed.run.find_recipe import find

from ...model import dense
from ...refusals import refused
from ...toys import TOYS

RECIPE = find("r29", TOYS["r29"], trace=False).recipe


def one_device():
    return make_mesh({"data": 1}, devices=jax.devices()[:1])


@pytest.fixture
def said(monkeypatch):
    """A small example, and a console whose text can be read."""
    monkeypatch.setattr(checks, "LENGTH", 104)
    return Console(file=io.StringIO(), width=400)


def on(mesh, ours, **fields):
    asked = ours.asked._replace(**fields)
    return device.Placement(mesh, "zero1", dataclasses.replace(ours, asked=asked))


def with_cudnn(fallbacks=("xla",), **rest):
    return device.Device("gpu", "cudnn", "missing", 512, fallbacks=fallbacks, **rest)


def by_xla(q, k, v, *, scale, offsets_BO, window, longest=None, gradient_window=None):
    """What cuDNN is told, computed by the plain backend."""
    starts = (
        jnp.zeros(q.shape[:2], jnp.int32).at[jnp.arange(2)[:, None], offsets_BO].set(1, mode="drop")
    )
    windows = {"window": window, "gradient_window": gradient_window}
    return attention(q, k, v, scale=scale, documents=find_documents(starts, 1), **windows)


def a_percent_off(x):
    return (1.01 * x.astype(jnp.float32)).astype(x.dtype)  # in bf16 1.01 would be 1.0078


def refuses(*_, **__):
    raise Refused("attention backend 'cudnn' cannot do this here (a test); choose another backend")


BROKEN = {
    "raises": (refuses, "Refused: attention backend 'cudnn' cannot do this here"),
    "NaN": (
        lambda *a, **k: by_xla(*a, **k).at[1, 3].set(jnp.nan),
        "the output is not a number somewhere",
    ),
    "1 % off": (lambda *a, **k: a_percent_off(by_xla(*a, **k)), "the output is off by 1.0"),
    "1 % off in one gradient": (
        lambda q, *a, **k: by_xla(q, *a, **k) + 0.1 * (q - jax.lax.stop_gradient(q)),
        "dq is",
    ),
    "no window": (lambda *a, **k: by_xla(*a, **k | {"window": None}), "the output is off by"),
}


@pytest.mark.parametrize(
    "broken",
    [
        pytest.param(b, marks=pytest.mark.slow if b in ("1 % off", "no window") else ())
        for b in BROKEN
    ],
)
def test_a_broken_backend_makes_way_for_the_next(broken, said, monkeypatch):
    wrong, reason = BROKEN[broken]
    monkeypatch.setattr(attention_backends, "cudnn", wrong)
    monkeypatch.setattr(checks, "WINDOW", 30)
    found = preflight.preflight(RECIPE, on(one_device(), with_cudnn(), fp8="auto"), said)
    assert (found.device.attention, found.device.fallbacks) == ("xla", ())
    [line] = said.file.getvalue().splitlines()
    assert reason in line and line.endswith("attention by xla")
    assert found.device.record()["refused"] == [
        line.removeprefix("preflight: ").removesuffix("; attention by xla")
    ]
    with pytest.raises(BadInput, match=f"--attention cudnn: .*{reason}.* give --no-preflight"):
        preflight.preflight(
            RECIPE,
            on(one_device(), with_cudnn((), asked=device.Request("cudnn")), fp8="auto"),
            said,
        )


@pytest.mark.parametrize(
    ("platform", "backend"),
    [("gpu", "triton"), pytest.param("tpu", "splash", marks=pytest.mark.slow)],
)
def test_kernels_of_pallas_are_checked_as_the_others_are(platform, backend, said, monkeypatch):
    """In JAX's interpreter; on a CPU without it they cannot run, and XLA's attention makes do."""
    monkeypatch.setattr(checks, "WINDOW", 30)
    ours = device.Device(platform, backend, "missing", 512, fallbacks=("xla",))
    recipe = dataclasses.replace(RECIPE, heads=1, attention_width=64)
    found = preflight.preflight(recipe, on(one_device(), ours), said)
    assert found.device.attention == "xla"
    assert f"attention {backend}: ValueError: Only interpret mode" in found.device.refused[0]
    interpreted = functools.partial(getattr(attention_backends, backend), interpret=True)
    monkeypatch.setattr(attention_backends, backend, interpreted)
    found = preflight.preflight(recipe, on(one_device(), ours), said)
    assert found.device.attention == backend
    assert found.device.checks == (f"attention {backend}, packed, heads of 64",)


def test_where_only_rows_are_wrong_lanes_are_taken(said, monkeypatch):
    """cuDNN is asked for both: as evaluation may have to call it, and as training does, told the
    longest document."""

    def wrong_rows(*qkv, longest=None, **rest):
        out = by_xla(*qkv, **rest)
        return a_percent_off(out) if longest else out

    def full_gradients(*qkv, gradient_window=None, **rest):
        return by_xla(*qkv, **rest)

    monkeypatch.setattr(checks, "WINDOW", 30)
    for wrong, words in (
        (full_gradients, "dq is off by"),
        (wrong_rows, "the output is off by 1.0"),
    ):
        monkeypatch.setattr(attention_backends, "cudnn", wrong)
        found = preflight.preflight(
            RECIPE, on(one_device(), with_cudnn(("cudnn_lanes", "xla"))), said
        )
        assert found.device.checks == ("attention cudnn_lanes, packed, heads of 128",)
        assert found.device.refused[0].startswith(f"attention cudnn: {words}")
    found = preflight.preflight(find("r21").recipe, on(one_device(), with_cudnn()), said)
    assert found.device.attention == "cudnn"
    assert found.device.checks == ("attention cudnn, packed, heads of 128",)


@pytest.mark.parametrize("off", [pytest.param(False, marks=pytest.mark.slow), True])
def test_tagged_documents_are_checked_where_a_kernel_tags_them(off, said, monkeypatch):
    def without_a_table(q, k, v, *, offsets_BO, **rest):
        if offsets_BO is not None:
            return by_xla(q, k, v, offsets_BO=offsets_BO, **rest)
        out = attention(q, k, v, **rest)
        return a_percent_off(out) if off else out

    monkeypatch.setattr(attention_backends, "cudnn", without_a_table)
    monkeypatch.setattr(checks, "WINDOW", 30)
    monkeypatch.setattr(checks, "custom_kernel_error", lambda kernel: None)
    there = with_cudnn(custom_kernels=frozenset({"XSA", "queries and keys"}))
    found = preflight.preflight(RECIPE, on(one_device(), there, custom_kernels="auto"), said)
    kinds = ["packed", "packed, a longest document"]
    names = [*(f"attention cudnn, {kind}, heads of 128" for kind in kinds), "custom kernel XSA"]
    if not off:
        names += [
            "custom kernel queries and keys",
            "attention cudnn, packed, documents tagged, heads of 128",
        ]
    assert found.device.checks == tuple(names)
    assert found.device.custom_kernels == ({"XSA"} if off else {"XSA", "queries and keys"})
    assert (
        "custom kernel queries and keys: the output is off by 1.0" in said.file.getvalue()
    ) == off


def test_no_backend_at_all_is_refused(said, monkeypatch):
    monkeypatch.setattr(checks, "attention", refuses)
    with pytest.raises(BadInput, match="no attention backend works .* cudnn: .*; attention x"):
        preflight.preflight(RECIPE, on(one_device(), with_cudnn()), said)


def test_fp8_falls_to_the_compute_dtype_unless_it_was_asked_for(said, monkeypatch):
    native = device.Device("gpu", "xla", "native", 512)
    found = preflight.preflight(RECIPE, on(one_device(), native, fp8="auto"), said)
    assert found.device.fp8 == "native" and "FP8 matmuls" in found.device.checks
    assert not said.file.getvalue()
    right = fp8.matmul
    monkeypatch.setattr(fp8, "matmul", lambda x, w, scales: a_percent_off(right(x, w, scales)))
    found = preflight.preflight(RECIPE, on(one_device(), native, fp8="auto"), said)
    assert found.device.fp8 == "missing"
    assert "FP8 matmuls: the output is off by 1.0" in said.file.getvalue()
    assert "in the compute dtype instead of FP8" in said.file.getvalue()
    with pytest.raises(BadInput, match="FP8 is 'on' but the preflight .*: the output is off"):
        preflight.preflight(RECIPE, on(one_device(), native, fp8="on"), said)
    assert (
        preflight.preflight(RECIPE, on(one_device(), native, fp8="off"), said).device.fp8
        == "native"
    )


OWN = device.Device("gpu", "xla", "missing", 512, custom_kernels=frozenset({"pointer", "XSA"}))


@pytest.fixture
def custom_kernels(monkeypatch):
    """Two that are right: of the others most have no interpreter within ``jax.jit``."""
    for module in pointer_attention, own_value:
        run = functools.partial(module.KERNEL.run, interpret=True)
        monkeypatch.setattr(module, "KERNEL", Kernel(run))
    monkeypatch.setattr(checks, "KERNEL_SIZES", Sizes(256, 64, 128, 2))


@pytest.mark.slow
def test_custom_kernels_fall_to_xla_unless_they_were_asked_for(custom_kernels, said, monkeypatch):
    found = preflight.preflight(RECIPE, on(one_device(), OWN, custom_kernels="auto"), said)
    assert found.device.custom_kernels == OWN.custom_kernels
    assert found.device.checks[-2:] == (
        "custom kernel XSA",
        "custom kernel pointer",
    )
    assert not said.file.getvalue()
    right = pointer_attention.KERNEL.run
    wrong = Kernel(lambda *a: [a_percent_off(x) for x in right(*a)])
    monkeypatch.setattr(pointer_attention, "KERNEL", wrong)
    found = preflight.preflight(RECIPE, on(one_device(), OWN, custom_kernels="auto"), said)
    assert found.device.custom_kernels == {"XSA"} and found.device.checks[-1] == "custom kernel XSA"
    assert found.device.record()["own"]
    [line] = said.file.getvalue().splitlines()
    assert "custom kernel pointer: shares, result 1, is off by " in line
    assert line.endswith("attention by xla; XLA's instead of custom kernel pointer")
    with pytest.raises(BadInput, match="OWN_KERNELS is 'on' but .* pointer: shares"):
        preflight.preflight(RECIPE, on(one_device(), OWN, custom_kernels="on"), said)
    assert (
        preflight.preflight(RECIPE, on(one_device(), OWN, custom_kernels="off"), said).device.checks
        == found.device.checks[:-1]
    )


def test_a_step_that_custom_kernels_do_not_fit_does_without(said):
    def build(placement):
        if placement.device.custom_kernels:
            raise Refused("pointer kernel: width must be 16, 32, 64 or 128")
        return types.SimpleNamespace(attention=placement.device.attention, compiled=())

    start = dataclasses.replace(OWN, checks=("attention xla", "custom kernel XSA"))
    _, found = preflight.compile_or_fall_back(RECIPE, on(one_device(), start), said, build)
    assert not found.device.custom_kernels and found.device.checks == ("attention xla",)
    assert "cannot be compiled with them (pointer kernel: width" in said.file.getvalue()
    with pytest.raises(BadInput, match="OWN_KERNELS is 'on' but .* compiled .*: width"):
        preflight.compile_or_fall_back(
            RECIPE, on(one_device(), start, custom_kernels="on"), said, build
        )


def test_a_cpu_has_nothing_to_choose_between(said, monkeypatch):
    monkeypatch.setattr(checks, "attention", refuses)
    mesh = one_device()
    assert preflight.preflight(RECIPE, on(mesh, device.device_of(mesh), fp8="auto"), said) == on(
        mesh, device.device_of(mesh), fp8="auto"
    )


def test_checks_are_made_in_every_run(said, monkeypatch):
    calls, mesh = [], make_mesh({"data": 2}, devices=jax.devices()[:2])
    monkeypatch.setattr(checks, "collectives_error", lambda mesh: calls.append(1))
    for _ in range(2):
        found = preflight.preflight(
            RECIPE, on(mesh, device.Device("gpu", "xla", "missing", 512)), said
        )
        assert found.device.checks[-1] == "all-reduce and reduce-scatter over 2 devices"
    assert len(calls) == 2


def test_sums_over_devices(said, monkeypatch):
    mesh = make_mesh({"data": 2, "model": 2}, devices=jax.devices()[:4])
    assert checks.collectives_error(mesh) is None
    right = jax.lax.psum_scatter
    monkeypatch.setattr(jax.lax, "psum_scatter", lambda *a, **k: right(*a, **k) + 1)
    found = checks.collectives_error(mesh)
    assert found is not None and found.startswith("the part of the sum that")
    monkeypatch.setattr(jax.lax, "psum", lambda x, axes: x)
    found = checks.collectives_error(mesh)
    assert found is not None and found.startswith("the sum of all devices is wrong")


@pytest.mark.parametrize("near", [None, 3])
def test_float64_reference_is_that_of_the_attention_tests(near):
    tokens = np.zeros((2, 40), int)
    tokens[0, [1, 30]] = 1
    q, k, v, g = np.random.default_rng(0).normal(size=(4, 2, 40, 3, 8))
    found = checks.attention_in_float64(q, k, v, g, 0.3, np.cumsum(tokens, axis=1), 7, near)
    seen, t = dense.mask(tokens, 1, 7), np.arange(40)
    of_near = t[:, None] - t < (near or 40)
    wanted = dense.forward(q, k, v, 0.3, seen)[0], *dense.backward(q, k, v, 0.3, seen, g, of_near)
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-10, atol=1e-12)


def test_a_step_that_cannot_be_compiled_takes_the_next_backend(said, monkeypatch):
    def build(placement):
        if placement.device.attention == "cudnn":
            raise jax.errors.JaxRuntimeError("INTERNAL: no execution plan\nand more")
        return types.SimpleNamespace(attention=placement.device.attention, compiled=())

    start = on(one_device(), with_cudnn())
    program, found = preflight.compile_or_fall_back(RECIPE, start, said, build)
    assert program.attention == found.device.attention == "xla"
    assert "cudnn: the step cannot be compiled with it (INTERNAL" in (said.file.getvalue())
    # The next one is checked as the first one was, unless nothing is (--no-preflight): no test
    # leaves cuDNN's name.
    assert not found.device.checks
    passed = "attention cudnn, packed, heads of 32", "FP8 matmuls"
    before = start.with_device(checks=passed, refused=("FP8: x",))
    _, found = preflight.compile_or_fall_back(RECIPE, before, said, build)
    assert [name.split(",")[0] for name in found.device.checks] == ["attention xla", "FP8 matmuls"]
    assert [reason[:16] for reason in found.device.refused] == ["FP8: x", "attention cudnn:"]
    three = before.with_device(fallbacks=("triton", "xla"))
    monkeypatch.setattr(attention_backends, "triton", refuses)
    _, found = preflight.compile_or_fall_back(RECIPE, three, said, build)
    assert found.device.attention == "xla"
    assert found.device.refused[-1].startswith("attention triton: Refused")
    asked = start.with_device(fallbacks=(), asked=device.Request("cudnn"))
    with pytest.raises(BadInput, match="--attention cudnn: .* cannot be compiled .* .INTERNAL"):
        preflight.compile_or_fall_back(RECIPE, asked, said, build)


F8 = {compiler.FP8_CALL: 3, "__cublas$lt$matmul": 282}
NO_F8 = {"__cublas$lt$matmul": 3}


@pytest.mark.parametrize("found", [[F8, F8], [F8, NO_F8], [NO_F8, F8]])
@pytest.mark.parametrize("field", ["auto", "on", "off", None])
def test_fp8_that_is_not_in_the_program_is_said_or_refused(found, field, said, monkeypatch):
    """Of two programs of a step, one of which may multiply in bf16 what was cast to FP8."""
    steps = [jax.jit(each).lower(1.0).compile() for each in (jnp.sin, jnp.cos)]
    both, left = types.SimpleNamespace(compiled=steps), list(found)
    for module in preflight, checked:
        monkeypatch.setattr(module, "custom_calls", lambda step: left[both.compiled.index(step)])
    native = device.Device("gpu", "cudnn", "native", 512, checks=("FP8 matmuls",))
    before = on(one_device(), native, fp8=field or "")
    lost = NO_F8 in found and field in ("auto", "on")
    monkeypatch.setenv("XLA_FLAGS", "--xla_a=b")
    if lost and field == "on":
        refused("1 of 2 .* XLA_FLAGS", preflight.count_kernels, both, before, said)
        return
    after = preflight.count_kernels(both, before, said)
    assert after.device.record()["calls"] == found[-1] and "calls" not in before.device.record()
    assert after.device.record()["fp8"] == ("emulated" if lost else "native")
    line = said.file.getvalue()
    assert (
        line.startswith("note: XLA compiled 1 of 2 training programs without an FP8 matmul")
        if lost
        else not line
    )


def test_calls_are_counted_in_the_program_s_own_text():
    """On a CPU XLA calls a function of its own for the largest entries: here once by itself, and
    once in a loop."""

    def largest(x):
        return jax.lax.top_k(x, 2)[0]

    step = jax.jit(lambda x: (largest(x), jax.lax.map(largest, x)))
    assert compiler.custom_calls(step.lower(jnp.ones((4, 8))).compile()) == {"TopK": 2}
    assert not compiler.custom_calls(jax.jit(jnp.sin).lower(1.0).compile())


def test_checks_are_compiled_with_the_options_of_steps(said, monkeypatch):
    monkeypatch.setattr(checks, "options_for", lambda platform: {"xla_no_such_option": platform})
    for check in (functools.partial(checks.attention_error, "xla", 32, True), checks.fp8_error):
        with pytest.raises(jax.errors.JaxRuntimeError, match="xla_no_such_option"):
            check()


def test_every_custom_kernel_has_the_shapes_of_plain_jax():
    """At the sizes of the preflight, traced alone: numbers are in tests/kernels, compilers in
    tests/aot."""
    for name in NAMES:
        kernel = custom_kernel(name)
        assert kernel.name == name
        for part, (own, plain, arrays) in kernel.examples(checks.KERNEL_SIZES).items():
            found, expected = (
                jax.tree.leaves(jax.eval_shape(run, *arrays)) for run in (own, plain)
            )
            assert [one.shape for one in found] == [one.shape for one in expected], part
