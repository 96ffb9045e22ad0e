"""Device-dependent settings: micro-batches, kernels, what fits in memory; and which settings are
refused."""

import math
import types
from dataclasses import replace
from functools import partial

import jax
import pytest

from jspeed.base import compiler
from jspeed.errors import BadInput
from jspeed.model.custom_kernels import Kernel
from jspeed.parallel.mesh import make_mesh, parse_mesh, request_cpu_devices
from jspeed.recipe import Context, Stage
from jspeed.run import setup
from jspeed.run.compute import device, division, program
from jspeed.run.compute.device import Placement
from jspeed.run.compute.division import place
from jspeed.run.find_recipe import find
from jspeed.run.options import Options

from ...refusals import refused
from ...toys import TOYS


def mesh_of(count):
    return make_mesh({"data": count}, devices=jax.devices()[:count])


def cuda(capability, memory=None):
    """A mesh of one device that claims to be a GPU."""
    stats = {"bytes_limit": memory} if memory else None
    gpu = types.SimpleNamespace(
        platform="gpu", process_index=0, compute_capability=capability, memory_stats=lambda: stats
    )
    return types.SimpleNamespace(devices=types.SimpleNamespace(flat=[gpu]))


@pytest.mark.parametrize(
    ("capability", "attention", "fp8"),
    [
        ("7.5", "xla", "missing"),
        ("8.0", "triton", "missing"),
        ("8.9", "triton", "native"),
        ("9.0", "cudnn", "native"),
        ("10.0", "cudnn", "native"),
        ("12.0", "triton", "native"),
    ],
)
def test_compute_capability_decides(capability, attention, fp8, monkeypatch):
    found = device.device_of(cuda(capability, 80_000_000_000))
    # 5 % are left
    assert (found.attention, found.fp8, found.memory) == (attention, fp8, 76_000_000_000)
    assert device.device_of(cuda(capability), "xla").attention == "xla"


def test_fp8_asked_for_where_it_is_missing():
    stage = Stage(steps=1, lane_len=8)
    missing, native, cpu = (
        Context(stage, True, fp8=word) for word in ("missing", "native", "emulated")
    )
    refused("no FP8 matmuls", missing.use_fp8, "on")
    refused("expected 'auto', 'on' or 'off'", cpu.use_fp8, "yes")
    assert [c.use_fp8("auto") for c in (missing, native, cpu)] == [False, True, False]
    assert cpu.use_fp8("on") and native.use_fp8("on") and not native.use_fp8("off")
    assert not Context(stage, training=False, fp8="native").use_fp8("on")


@pytest.mark.parametrize(("devices", "micro_batch"), [(3, None), (8, 32), (1, 20), (1, 48), (1, 0)])
def test_refuses_a_batch_that_does_not_divide(devices, micro_batch):
    recipe, mesh = find("stdlib", TOYS["stdlib"]).recipe, mesh_of(devices)
    with pytest.raises(BadInput, match="128 tokens") as error:
        asked = device.device_of(mesh, micro_batch=micro_batch)
        division.micro_batches(recipe, recipe.stages[0], mesh, asked)
    assert str(micro_batch if micro_batch is not None else devices) in str(error.value)


def test_a_device_takes_the_whole_lanes_of_its_micro_batch():
    recipe, mesh = find("stdlib", TOYS["stdlib"]).recipe, mesh_of(1)
    cpu = device.device_of(mesh)
    gpu = device.device_of(cuda("9.0"))
    for length, width, one, numbers in (
        (256, 64, cpu, (4, 8)),
        (256, 48, cpu, (1, 2, 4, 8)),  # 8 lanes x 256 x 48: a narrow batch is taken whole
        (4096, 16, cpu, (8,)),
        (49_152, 48, gpu, (8,)),
        (16_384, 48, gpu, (2, 4, 8)),
    ):
        stage, wide = Stage(steps=1, lane_len=length), replace(recipe, attention_width=width)
        assert division.micro_batches(wide, stage, mesh, one) == numbers


def test_a_placement_has_the_micro_batches_of_each_stage():
    recipe, mesh = find("stdlib", TOYS["stdlib"]).recipe, mesh_of(1)
    cpu, stage = device.device_of(mesh), recipe.stages[0]
    stages = stage, replace(stage, lane_len=2 * stage.lane_len)
    two = replace(recipe, stages=stages)
    wide = replace(two, attention_width=1024)
    assert place(wide, mesh, "zero1", replace(cpu, at_once=64)).parts == (2, 4)
    asked = place(two, mesh, "zero1", device.device_of(mesh, micro_batch=32))
    assert asked.micro_batches == ((4,), (8,))
    assert place(two, mesh, "zero1", cpu).micro_batches == ((1, 2, 4, 8),) * 2
    small = device.device_of(mesh, micro_batch=16)
    refused("--micro-batch 16: .*8 lanes of 32", place, two, mesh, "zero1", small)
    refused("zero2", place, two, mesh, "zero2", cpu)


@pytest.mark.slow
def test_out_of_memory_is_found_at_compile_with_what_fits():
    recipe = find("stdlib", [*TOYS["stdlib"], "LANES=2", "LANE_LEN=256", "LAYERS=1"]).recipe
    mesh, stage = mesh_of(1), recipe.stages[0]
    cpu = device.device_of(mesh)
    steps = [program.trace_step(recipe, stage, Placement(mesh, "zero1", cpu), n) for n in (1, 2)]
    large, small = (compiler.memory_needed(step.lower().compile()) for step in steps)
    assert small < large
    tight = replace(cpu, memory=(small + large) // 2)
    asked = place(recipe, mesh, "zero1", replace(tight, asked=device.Request(None, 512)))
    refused("512 .*--micro-batch", program.fit, recipe, asked, 0)
    assert program.fit(recipe, place(recipe, mesh, "zero1", tight), 0)[1] == 2
    assert program.compile_program(recipe, place(recipe, mesh, "zero1", tight), 1).parts == (2,)
    tiny = place(recipe, mesh, "zero1", replace(cpu, memory=1000, asked=device.Request(None, 256)))
    refused("with 256 tokens at once .*; use more or larger", program.fit, recipe, tiny, 0)


def test_what_an_evaluation_leaves_on_the_device_is_counted():
    """Two moments of Adam beside each parameter, cut among the devices in their turn."""
    recipe = find("stdlib").recipe
    placements = [Placement(mesh_of(n), "zero1", device.device_of(mesh_of(n))) for n in (1, 2)]
    one, two = (program.idle_state_bytes(recipe, placement) for placement in placements)
    params = 4 * sum(
        math.prod(p.shape)
        for p in jax.tree.leaves(recipe.parameters, is_leaf=lambda x: hasattr(x, "shape"))
    )
    assert 0.99 * params < one <= 2.01 * params and two < 0.6 * one


def test_an_evaluation_that_does_not_fit_is_refused():
    recipe, mesh = find("stdlib", TOYS["stdlib"]).recipe, mesh_of(1)
    small = replace(device.device_of(mesh), memory=1000)
    placed = Placement(mesh, "zero1", small)
    refused("lanes of 16 .* 0.0 GB", program.compile_evaluation, recipe, placed, 16, 1)


@pytest.mark.parametrize(
    "text",
    ["", *"data data=x model=2 data=0 data=-1,model=-1 data=-2 data=2,data=2 data=2,pip=2".split()]
    + "data=100000000 data=1000000000000 data=1024,model=1024,pipe=1024 data=² data=1_0".split(),
)
def test_refuses_mesh_text(text):
    refused(f"--mesh {text}", parse_mesh, text)


def test_a_process_is_asked_for_no_more_cpu_devices_than_it_has(monkeypatch):
    monkeypatch.delenv("JAX_NUM_CPU_DEVICES", raising=False)
    refused("--mesh data=500,model=2 ", request_cpu_devices, parse_mesh("data=500,model=2"))


@pytest.mark.parametrize(
    ("there", "name", "micro_batch", "expected"),
    [
        (1, "nanogpt", None, 1),
        (7, "nanogpt", None, 6),  # of 12 lanes
        (64, "stdlib", None, division.CPU_DEVICES),
        (8, "nanogpt", 12 * 64, 1),
        (8, "nanogpt", 4 * 64, 3),
        (8, "gpt2", None, 2),  # of which each holds all parameters
    ],
)
def test_cores_are_as_many_devices_as_divide_the_batch(
    monkeypatch, there, name, micro_batch, expected
):
    monkeypatch.setattr(division, "cores", lambda: there)
    sets = ["LANES=12", "LANE_LEN=64"] if name == "nanogpt" else []
    assert division.devices_of_cpu(find(name, sets).recipe, micro_batch) == expected


def test_only_a_process_that_is_a_run_divides_its_cores(monkeypatch):
    asked = []
    monkeypatch.setattr(setup, "request_cpu_devices", asked.append)
    monkeypatch.setattr(setup, "devices_of_cpu", lambda *_: 4)
    for mesh, alone in ((None, False), ("data=8", True), (None, True)):
        assert asked == []
        setup.load_recipe_and_placement(Options("stdlib", mesh=mesh), alone=alone)
    assert asked == [{"data": 4}]


def test_attention_backends_are_those_of_the_devices():
    assert device.device_of(cuda("9.0"), "cudnn").attention == "cudnn"
    one = mesh_of(1)
    for mesh, backend in ((one, "nope"), (one, "cudnn"), (one, ""), (cuda("9.0"), "splash")):
        refused(f"--attention {backend}: .* backends are .*xla", device.device_of, mesh, backend)


def test_mesh_fills_minus_one_and_counts_devices():
    assert dict(make_mesh(parse_mesh("data=-1,model=2")).shape) == {"data": 4, "model": 2}
    refused("needs 3 devices but JAX has 8", make_mesh, parse_mesh("data=3"))


@pytest.mark.parametrize(
    ("fp8", "asked", "value", "why"),
    [
        ("emulated", "auto", "off", "there are no FP8 matmuls here"),
        ("missing", "auto", "off", "from compute capability 8.9 on, this is 9.0"),
        ("native", "off", "off", "FP8=off"),
        ("native", "auto", "native", "on tensor cores"),
        ("emulated", "on", "emulated", "no faster"),
    ],
)
def test_fp8_in_words(fp8, asked, value, why):
    capability = None if fp8 == "emulated" else (9, 0)
    given = device.Device("gpu", "xla", fp8, 512, capability=capability)
    _, found, _ = device.choices(replace(given, asked=device.Request(fp8=asked)))
    assert (found.name, found.value) == ("FP8", value) and why in found.why
    assert len(device.choices(given)) == 2


def test_what_was_found_and_asked_is_the_reason():
    gpu = device.Device("gpu", "triton", "missing", 512, capability=(9, 0), note="a note")
    asked = device.Request("triton", 4096, "auto", "auto")
    refused = tuple(
        f"{name}: bad" for name in ("attention cudnn", "FP8 matmuls", "custom kernel A")
    )
    fallen = replace(gpu, asked=asked._replace(attention=None), refused=refused)
    whys = [choice.why for choice in device.choices(fallen)]
    assert whys == [*refused, "--micro-batch"]
    given = {choice.name: choice for choice in device.choices(replace(gpu, asked=asked))}
    assert given["attention"].why == "--attention"
    assert given["custom kernels"].why == "there are none for gpu devices"
    assert given["micro-batch"].value == "4,096 tokens"


@pytest.mark.parametrize(
    ("attention", "fp8", "capability", "words"),
    [
        ("cudnn", "native", (9, 0), ["compute capability 9.0", "on tensor cores"]),
        ("triton", "missing", (8, 0), ["not yet run", "this is 8.0", "compute capability 8.9"]),
        ("xla", "missing", (7, 5), ["capability 8.0, this is 7.5", "compute capability 8.9"]),
    ],
)
def test_why_a_gpu_gets_its_kernels(attention, fp8, capability, words):
    asked = device.Request(fp8="on")
    gpu = device.Device("gpu", attention, fp8, 512, capability=capability, asked=asked)
    said = " ".join(choice.why for choice in device.choices(gpu))
    assert all(word in said for word in words)


def test_a_device_without_kernels_of_its_own_gets_its_note():
    asked = device.Request(fp8="on")
    tpu = device.Device("tpu", "splash", "missing", 512, asked=asked, note="TPU v9: new")
    assert [choice.why for choice in device.choices(tpu)][:2] == ["TPU v9: new"] * 2


def other(platform, **attributes):
    """A mesh of one device of another kind, with the attributes that JAX gives it."""
    found = types.SimpleNamespace(platform=platform, process_index=0, **attributes)
    return types.SimpleNamespace(devices=types.SimpleNamespace(flat=[found]))


BYTES = {"bytes_limit": 16_000_000_000}
V5E = other("tpu", device_kind="TPU v5 lite", memory_stats=lambda: BYTES)


@pytest.mark.parametrize(
    ("mesh", "note"),
    [
        (
            other("gpu", device_kind="AMD MI300X", compute_capability="gfx942"),
            "unknown device kind",
        ),
        (other("metal", device_kind="Apple M4"), "Apple M4 (metal) is an unknown device kind"),
    ],
)
def test_an_unknown_device_gets_the_plain_path_and_a_note(mesh, note):
    found = device.device_of(mesh)
    assert (found.attention, found.fp8, found.fallbacks) == ("xla", "missing", ())
    assert note in found.note
    assert device.device_of(mesh, "xla").attention == "xla"
    refused(r"the backends are xla", device.device_of, mesh, "cudnn")


def test_a_tpu_gets_splash_attention_then_xla():
    mesh = V5E
    found = device.device_of(mesh, recipe=find("r29", TOYS["r29"]).recipe)
    assert (found.attention, found.fallbacks, found.fp8) == ("splash", ("xla",), "missing")
    assert (
        found.note.startswith("TPU v5 lite: splash attention, no FP8") and not found.asked.attention
    )
    assert device.device_of(mesh, "splash").fallbacks == ()
    assert device.device_of(mesh, "xla").attention == "xla"
    refused("on tpu devices the backends are splash, xla", device.device_of, mesh, "cudnn")


def test_no_options_for_gpus_reach_another_compiler(monkeypatch):
    given = []
    lowered = types.SimpleNamespace(compile=lambda compiler_options: given.append(compiler_options))
    for platform in ("cpu", "tpu", "metal", "gpu", "cuda"):
        compiler.compiled(lowered, device.Device(platform, "xla", "missing", 1))
    assert given == [None, compiler.TPU_OPTIONS, None, compiler.GPU_OPTIONS, compiler.GPU_OPTIONS]


def test_processes_tune_kernels_each_for_itself(monkeypatch):
    """Else one whose cache has the program gives no results, and the others wait for them."""
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    assert compiler.options_for("gpu") == compiler.GPU_OPTIONS | {compiler.SHARDED_TUNING: False}
    assert compiler.options_for("cpu") is None
    monkeypatch.setenv("XLA_FLAGS", f"--{compiler.SHARDED_TUNING}=true")
    assert compiler.options_for("gpu") == compiler.GPU_OPTIONS


def test_flags_of_the_user_s_go_before_options_for_gpus(monkeypatch):
    """Else XLA would take ours: options of one program are stronger than those of the process."""
    chosen, others = "xla_gpu_enable_triton_gemm", compiler.GPU_OPTIONS.keys()
    for flags in (f"--{chosen}=true", f"--xla_dump_to=x --{chosen} --xla_y=1"):
        monkeypatch.setenv("XLA_FLAGS", flags)
        assert compiler.options_for("gpu").keys() == others - {chosen}
    monkeypatch.setenv("XLA_FLAGS", f"--{chosen}_any=true")
    assert compiler.options_for("gpu") == compiler.GPU_OPTIONS


def test_a_tpu_s_compiler_short_of_memory_is_asked_for_less(monkeypatch):
    """Its words are those of libtpu 0.0.42 for a v5e."""
    words = "RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required for HLO "
    words += "temporaries (53.65G) exceeds available HBM (15.75G)."
    tpu = device.Device("tpu", "splash", "missing", 512, memory=16 * 10**9)
    recipe, mesh = find("stdlib", TOYS["stdlib"]).recipe, mesh_of(1)

    class Lowered(types.SimpleNamespace):
        def lower(self):
            return self

        def compile(self, compiler_options):
            if self.parts < 4:
                raise jax.errors.JaxRuntimeError(words)
            return self

    monkeypatch.setattr(program, "trace_step", lambda *a: Lowered(parts=a[3]))
    monkeypatch.setattr(compiler, "memory_needed", lambda step: 10**9)
    assert program.fit(recipe, place(recipe, mesh, "zero1", tpu), 0)[1] == 4
    asked = place(recipe, mesh, "zero1", replace(tpu, asked=device.Request(None, 128)))
    refused("57.6 GB .* 16.0 GB; .*--micro-batch", program.fit, recipe, asked, 0)
    refused(r"a program needs 57.6 GB of a device", compiler.compiled, Lowered(parts=1), tpu)
    with pytest.raises(jax.errors.JaxRuntimeError):
        compiler.compiled(Lowered(parts=1), device.Device("gpu", "cudnn", "native", 512))


def test_memory_decides_the_first_micro_batch():
    assert device.tokens_at_once(None) == device.tokens_at_once(64 * 10**9) == 65_536
    assert device.tokens_at_once(18 * 10**9) == 20_000  # three quarters of 24 GB
    assert device.device_of(V5E).at_once == 17_777


@pytest.mark.parametrize(
    ("capability", "without_documents", "with_documents"),
    [
        ("7.5", "xla", "xla"),
        ("8.6", "cudnn triton xla", "triton xla"),
        ("9.0", "cudnn triton xla", "cudnn cudnn_lanes triton xla"),
        ("10.0", "cudnn triton xla", "cudnn cudnn_lanes triton xla"),
        ("12.0", "cudnn triton xla", "triton xla"),
    ],
)
def test_the_chain_of_backends(capability, without_documents, with_documents, monkeypatch):
    for name, chain in {"track3": without_documents, "r29": with_documents}.items():
        toy = find(name, TOYS[name]).recipe
        # of 64 and of 32 channels
        for heads, expected in {1: chain, 2: chain.replace("triton ", "")}.items():
            recipe = replace(toy, attention_width=64, heads=heads)
            found = device.device_of(cuda(capability), recipe=recipe)
            assert " ".join((found.attention, *found.fallbacks)) == expected


KERNEL = Kernel(print)


@pytest.mark.parametrize(
    ("asked", "there", "used"),
    [
        ("auto", {"MLP"}, True),
        ("auto", {"XSA"}, False),
        ("auto", (), False),
        ("off", {"MLP"}, False),
    ],
)
def test_custom_kernels_are_used_in_training_where_they_run(asked, there, used):
    stage = find("stdlib", trace=False).recipe.stages[0]
    there = dict.fromkeys(there, KERNEL)
    found = Context(stage, training=True, kernels=there).kernel(asked, "MLP")
    assert found == (KERNEL if used else None)
    assert not Context(stage, training=False, kernels=there).kernel(asked, "MLP")


def test_asked_custom_kernels_that_do_not_run_are_a_sentence():
    context = partial(Context, find("stdlib", trace=False).recipe.stages[0], training=True)
    there = context(kernels={"MLP": KERNEL})
    assert there.kernel("on", "MLP") == KERNEL
    # a recipe is read before devices are known
    assert not context().kernel("on", "MLP")
    refused("OWN_KERNELS is 'on' but these devices", context(kernels={}).kernel, "on", "MLP")
    refused("field OWN_KERNELS is 'yes'; expected", there.kernel, "yes", "MLP")
