"""Cost of kernels: HLO that XLA wrote for an H100 against arithmetic by hand."""

import dataclasses
import math

import numpy as np
import pytest

from jspeed.model.custom_kernels import label
from jspeed.plan import assumed, attention, cost, hlo, predict
from jspeed.plan.describe import matrices_of
from jspeed.plan.measured import terms
from jspeed.plan.target import parse_target
from jspeed.run.find_recipe import find

# Shortened from the program of r29 for 8 H100s: names, shapes and configurations are XLA's.
TEXT = """HloModule jit_step, is_scheduled=true, num_partitions=8

%fused_slice (param_0.1: bf16[48,768,768]) -> bf16[768,768] {
  %param_0.1 = bf16[48,768,768]{2,1,0} parameter(0)
  %wide = f32[48,768,768]{2,1,0} convert(%param_0.1)
  %cut = f32[1,768,768]{2,1,0} slice(%wide), slice={[0:1], [0:768], [0:768]}
  %narrow = bf16[1,768,768]{2,1,0} convert(%cut)
  ROOT %flat = bf16[768,768]{1,0} bitcast(%narrow)
}

ENTRY %main (x: bf16[49152,768], part: bf16[6,768,768]) -> bf16[49152,768] {
  %x = bf16[49152,768]{1,0} parameter(0)
  %part = bf16[6,768,768]{2,1,0} parameter(1)
  %all-gather-start = (bf16[6,768,768]{2,1,0}, bf16[48,768,768]{2,1,0}) all-gather-start(%part), \
channel_id=1, \
replica_groups={{0,1,2,3,4,5,6,7}}, dimensions={0}, use_global_device_ids=true, \
metadata={op_name="jit(step)/shard_map/all_gather"}, \
backend_config={"collective_backend_config":{"is_sync":false}}
  %xt = bf16[768,49152]{0,1} transpose(%x), dimensions={1,0}
  %all-gather-done = bf16[48,768,768]{2,1,0} all-gather-done(%all-gather-start)
  %w = bf16[768,768]{1,0} fusion(%all-gather-done), kind=kLoop, calls=%fused_slice
  %product = (bf16[49152,768]{1,0}, s8[4194304]{0}) custom-call(%x, %w), \
custom_call_target="__cublas$lt$matmul", \
metadata={op_name="jit(step)/shard_map/jvp()/dot_general"}, \
backend_config={"gemm_backend_config":{"alpha_real":1,\
"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"],"rhs_contracting_dimensions":["0"],\
"lhs_batch_dimensions":[],"rhs_batch_dimensions":[]}}}
  %q = bf16[1,49152,6,128]{3,2,1,0} bitcast(%x)
  %attention = (bf16[1,6,49152,128]{3,1,2,0}, f32[192,6,49152]{2,1,0}, u8[0]{0}) custom-call(%q, \
%q, %q), \
custom_call_target="__cudnn$fmhaSoftmax", \
metadata={op_name="jit(step)/shard_map/jvp()/dot_product_attention_fwd"}, \
backend_config={"cudnn_fmha_backend_config": {"fmha_scale": 0.12, "intermediate_tensor_shape": {\
"element_type": "BF16", "dimensions": ["1", "6", "49152", "49152"]}, \
"mask_type": "PADDING_CAUSAL", "sliding_window_length": 1409, "max_seg_per_batch": 192}}
  ROOT %out = bf16[49152,768]{1,0} get-tuple-element(%product), index=0
}
"""
H100 = parse_target("h100x8")
MEGA = 10**6


@pytest.fixture
def kernels():
    return cost.kernels(TEXT, max_doc_len=2048)


def test_kernels_in_order(kernels):
    assert [
        kernel.kind for kernel in kernels
    ] == "collective other fusion matmul attention_forward".split()
    assert kernels[0].waited_at == 2  # one kernel runs beside it


def test_flops(kernels):
    product, attention = kernels[-2:]
    assert product.flops == 2 * 49152 * 768 * 768
    assert product.dims == (1, 49152, 768, 768)
    # Documents of 2,048 tokens: token t of one sees min(t + 1, 1409) keys.
    keys = sum(min(t + 1, 1409) for t in range(2048)) / 2048
    assert attention.flops == pytest.approx(2 * 2 * 6 * 49152 * 128 * keys)
    [*_, wider] = cost.kernels(TEXT.replace("1409", "4096"))
    keys = sum(min(t + 1, 4096) for t in range(49152)) / 49152
    assert wider.flops == pytest.approx(2 * 2 * 6 * 49152 * 128 * keys)


# As XLA writes calls of our custom kernels for an A100, but for the kernel's code, and of another
# lane and smaller blocks.
OWN = """HloModule jit_step, is_scheduled=true

ENTRY %main (q: bf16[2,100,3,64], first: s32[2,100]) -> bf16[2,100,3,64] {
  %q = bf16[2,100,3,64]{3,2,1,0} parameter(0)
  %first = s32[2,100]{1,0} parameter(1)
  %pallas_call.7 = (bf16[2,100,3,64]{3,2,1,0}, f32[2,3,100]{2,1,0}) custom-call(%q, %q, %q, \
%first), \
custom_call_target="__gpu$xla.gpu.triton", api_version=API_VERSION_TYPED_FFI, \
metadata={op_name="jit(f)/jvp(LABEL)/pallas_call" \
stack_frame_id=12}, \
backend_config={debug = false, grid_x = 7 : i32, grid_y = 3 : i32, grid_z = 2 : i32, ir = \
"ML\\EFR", \
name = "LABEL", num_stages = 2 : i32, num_warps = 8 : i32}
  %other = bf16[2,100,3,64]{3,2,1,0} custom-call(%q), custom_call_target="__gpu$xla.gpu.triton", \
backend_config={name = "of_another_author"}
  ROOT %out = bf16[2,100,3,64]{3,2,1,0} get-tuple-element(%pallas_call.7), index=0
}
"""


@pytest.mark.parametrize(("name", "matmuls"), [("forward", 2), ("dq", 3), ("dk_dv", 4)])
@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("window", [24, 1, 0])
def test_own_attention_counts_the_blocks_it_visits(name, matmuls, packed, window):
    kind = "forward" if name == "forward" else "backward"
    numbers = {"packed": int(packed), "window": window or None, "own": 16, "visited": 8}
    text = OWN.replace("LABEL", label("fused_attention", name, **numbers))
    call, other = cost.kernels(text, max_doc_len=40)
    assert (call.kind, other.kind, other.flops) == (f"attention_{kind}", "other", 0.0)
    # seven blocks of 16, the last one not full
    t, s = np.arange(112)[:, None], np.arange(112)[None]
    seen = (s <= t) & (t < 100) & (t - s < (window or 100)) & ((t // 40 == s // 40) | (not packed))
    if name == "dk_dv":
        seen = seen.T
    blocks = seen.reshape(7, 16, 14, 8).any((1, 3))
    visited = sum(np.ptp(np.flatnonzero(row)) + 1 for row in blocks) * 16 * 8
    assert call.flops == matmuls * 2 * 2 * 3 * 64 * visited
    # every array once
    assert call.bytes == 4 * 2 * 2 * 100 * 3 * 64 + 4 * 2 * 100 + 4 * 2 * 3 * 100


@pytest.mark.parametrize(("name", "matmuls"), [("forward", 1), ("dq", 2), ("dk", 2)])
@pytest.mark.parametrize("window", [24, 1, 4096])
def test_the_pointer_counts_the_blocks_it_visits(name, matmuls, window):
    """One head, and keys before the query; windows of attention are others."""
    result = "f32[2,100]{1,0}" if name == "forward" else "bf16[2,100,1,64]{3,2,1,0}"
    named = label("pointer_attention", name, width=64, window=window, own=16, visited=8)
    text = OWN.replace("LABEL", named).replace(",3,64]", ",1,64]")
    text = text.replace(
        "(bf16[2,100,1,64]{3,2,1,0}, f32[2,3,100]{2,1,0}) custom", f"({result}, {result}) custom"
    )
    call, _ = cost.kernels(text, max_doc_len=40)
    assert (call.kind, call.dtype) == (
        f"attention_{'forward' if name == 'forward' else 'backward'}",
        "bf16",
    )
    # seven blocks of 16, the last one not full
    t, s = np.arange(112)[:, None], np.arange(112)[None]
    # a block is visited for its own token too
    seen = (s <= t) & (t < 100) & (t - s <= window) & (t // 40 == s // 40)
    blocks = (seen.T if name == "dk" else seen).reshape(7, 16, 14, 8).any((1, 3))
    visited = sum(np.ptp(np.flatnonzero(row)) + 1 for row in blocks) * 16 * 8
    assert call.flops == matmuls * 2 * 2 * 64 * visited


# As XLA writes calls of splash attention for a TPU, but for code and some operands. Its metadata
# has line ends.
SPLASH = """HloModule jit_step, is_scheduled=true

ENTRY %main (q: bf16[2,3,1024,64]) -> bf16[2,3,1024,64] {
  %q = bf16[2,3,1024,64]{3,2,1,0:T(8,128)(2,1)} parameter(0)
  %splash_mha_NAME.1 = (f32[2,256,64]{2,1,0:T(8,128)}, \
bf16[2,3,1024,64]{3,2,1,0:T(8,128)(2,1)S(1)}) custom-call(%q, \
%q, /*index=5*/%q), custom_call_target="tpu_custom_call", frontend_attributes={kernel_metadata={
"xprof_metadata":"{\\"block_q_dq\\": 256, \\"q_layout\\": 1}"
}}, metadata={op_name="jit(f)/jvp(LABEL)/\
vmap(static_sparsity_splash)/jit(_splash_attention)/\
splash_mha_NAME/splash_mha_NAME/pallas_call" stack_frame_id=9}, \
backend_config={"custom_call_config":{"body":"TUzvUg="}}
  ROOT %out = bf16[2,3,1024,64]{3,2,1,0:T(8,128)(2,1)} get-tuple-element(%splash_mha_NAME.1), \
index=1, \
frontend_attributes={kernel_metadata={
"xprof_metadata":"{\\"block_q_dq\\": 256, \\"q_layout\\": 1}"
}}, metadata={op_name="jit(f)/jvp(LABEL)/splash_mha_NAME/pallas_call" \
stack_frame_id=9}
}
"""


@pytest.mark.parametrize(
    ("name", "kind", "matmuls"),
    [
        ("fwd_segmented_residuals", "forward", 2),
        ("dq_segmented_no_residuals", "backward", 3),
        ("dkv_no_residuals", "backward", 4),
    ],
)
@pytest.mark.parametrize("window", [300, 1, 0])
def test_splash_attention_counts_the_blocks_it_visits(name, kind, matmuls, window):
    """Blocks of the causal mask and the window; documents end none. Operands of 256 tokens are read
    for each pair."""
    named = label("splash_attention", "attend", window=window or None, own=256)
    [call] = cost.kernels(SPLASH.replace("NAME", name).replace("LABEL", named), max_doc_len=40)
    t, s = np.arange(1024)[:, None], np.arange(1024)[None]
    seen = (s <= t) & (t - s < (window or 1024))
    pairs = seen.reshape(4, 256, 4, 256).any((1, 3)).sum()
    assert (call.kind, call.dtype) == (f"attention_{kind}", "bf16")
    assert call.flops == matmuls * 2 * 2 * 3 * 64 * 256 * 256 * pairs
    once = 2 * 3 * 1024 * 64 * 2
    # The result stays on the chip, in memory space 1.
    assert call.bytes == 3 * once + 4 * 2 * 256 * 64 + 2 * once * (pairs * 256 / 1024 - 1)


def test_bytes(kernels):
    _, transpose, fusion, product, _ = kernels
    assert transpose.bytes == 2 * 2 * 49152 * 768
    assert fusion.bytes == 2 * 2 * 768 * 768  # the slice that it reads, not the 48 matrices
    assert product.bytes == 2 * (2 * 49152 * 768 + 768 * 768) + 4194304


def test_a_head_of_which_a_sample_is_scored_is_known_by_its_rows(kernels):
    recipe = find("fineweb-cpu", trace=False).recipe
    matrices = matrices_of(recipe, recipe.stages[0])
    assert matrices["head"] == (8348, 128) and matrices["up"] == (128, 512)
    for dims in ((1, 4096, 128, 8348), (1, 8348, 4096, 128)):
        assert cost.part_of(kernels[3]._replace(dims=dims), matrices) == "head"
    whole = dataclasses.replace(recipe.stages[0], scored=None)
    assert matrices_of(recipe, whole)["head"] == (50_304, 128)


# A gate reads 6 channels of every row, of a table's rows too; a cast reads all that it writes.
SLICED = """HloModule jit_step, is_scheduled=true

%fused_pad (x: bf16[4096,768], scale: f32[4096], table: bf16[50304,768], ids: s32[4096,1]) -> \
bf16[4096,16] {
  %x = bf16[4096,768]{1,0} parameter(0)
  %scale = f32[4096]{0} parameter(1)
  %table = bf16[50304,768]{1,0} parameter(2)
  %ids = s32[4096,1]{1,0} parameter(3)
  %wide = f32[4096,768]{1,0} convert(%x)
  %scales = f32[4096,768]{1,0} broadcast(%scale), dimensions={0}
  %normed = f32[4096,768]{1,0} multiply(%wide, %scales)
  %cut = f32[4096,8]{1,0} slice(%normed), slice={[0:4096], [0:8]}
  %narrow = bf16[4096,8]{1,0} convert(%cut)
  %rows = bf16[4096,768]{1,0} gather(%table, %ids), offset_dims={1}
  %some = bf16[4096,8]{1,0} slice(%rows), slice={[0:4096], [0:8]}
  ROOT %both = bf16[4096,16]{1,0} concatenate(%narrow, %some), dimensions={1}
}

%fused_convert (a: f32[4096,768]) -> bf16[4096,768] {
  %a = f32[4096,768]{1,0} parameter(0)
  ROOT %cast = bf16[4096,768]{1,0} convert(%a)
}

ENTRY %main (x: bf16[4096,768], s: f32[4096], t: bf16[50304,768], i: s32[4096,1], a: \
f32[4096,768]) -> bf16[4096,768] {
  %x = bf16[4096,768]{1,0} parameter(0)
  %s = f32[4096]{0} parameter(1)
  %t = bf16[50304,768]{1,0} parameter(2)
  %i = s32[4096,1]{1,0} parameter(3)
  %a = f32[4096,768]{1,0} parameter(4)
  %gate = bf16[4096,16]{1,0} fusion(%x, %s, %t, %i), kind=kLoop, calls=%fused_pad
  ROOT %cast = bf16[4096,768]{1,0} fusion(%a), kind=kLoop, calls=%fused_convert
}
"""


def test_a_fusion_reads_what_it_uses():
    gate, cast = cost.kernels(SLICED)
    ids, scales, written = 4 * 4096, 4 * 4096, 2 * 4096 * 16
    assert gate.bytes == ids + scales + written + 2 * (2 * 4096 * 8)
    # once counted as nothing read: a cast has no user within its fusion
    assert cast.bytes == 6 * 4096 * 768


SLICE_MULTIPLIED = """HloModule jit_step, is_scheduled=true

%dynamic-slice-fusion (bank: bf16[4,64,32], x: bf16[16,64]) -> (bf16[16,32], s8[8]) {
  %bank = bf16[4,64,32]{2,1,0} parameter(0)
  %x = bf16[16,64]{1,0} parameter(1)
  %part = bf16[1,64,32]{2,1,0} slice(%bank), slice={[1:2], [0:64], [0:32]}
  %matrix = bf16[64,32]{1,0} bitcast(%part)
  ROOT %product = (bf16[16,32]{1,0}, s8[8]{0}) custom-call(%x, %matrix), \
custom_call_target="__cublas$lt$matmul", \
backend_config={"gemm_backend_config":{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"],\
"rhs_contracting_dimensions":["0"],"lhs_batch_dimensions":[],"rhs_batch_dimensions":[]}}}
}

ENTRY %main (bank: bf16[4,64,32], x: bf16[16,64]) -> (bf16[16,32], s8[8]) {
  %bank = bf16[4,64,32]{2,1,0} parameter(0)
  %x = bf16[16,64]{1,0} parameter(1)
  ROOT %both = (bf16[16,32]{1,0}, s8[8]{0}) fusion(%bank, %x), kind=kCustom, \
calls=%dynamic-slice-fusion
}
"""


def test_a_matmul_of_a_bank_s_slice_is_one_also_inside_a_fusion():
    """As jaxlib 0.12 writes it; once its FLOPs were none, and record 29 a third quicker."""
    [kernel] = cost.kernels(SLICE_MULTIPLIED)
    assert (kernel.kind, kernel.dtype, kernel.flops) == ("matmul", "bf16", 2 * 16 * 64 * 32)


def test_parts(kernels):
    matrices = {"attention": (768, 768), "mlp": (768, 3072)}
    assert [cost.part_of(kernel, matrices) for kernel in kernels[-2:]] == [
        "attention",
        "attention scores",
    ]
    outside = kernels[3].instruction._replace(op_name="jit(step)/dot_general")
    assert cost.part_of(kernels[3]._replace(instruction=outside), matrices) == "optimizer"


def test_times_by_hand(kernels):
    """By flat rates, of a GPU without tables; of an H100 NVIDIA's and ours."""
    flat = H100._replace(target=H100.target._replace(name="none"))
    sheet, fractions = H100.target.data_sheet, assumed.FRACTIONS
    total, collectives = predict.simulate(kernels, flat)
    copy = 2 * 2 * 49152 * 768 / (sheet.hbm_bytes_per_second * fractions["memory"])
    sent = 48 * 768 * 768 * 2 * 7 / 8 / (450e9 * fractions["communication"]) + assumed.LATENCY
    assert total.communication == pytest.approx(sent)
    assert total.exposed_communication == pytest.approx(sent - copy)
    assert collectives[0] == pytest.approx((sent, sent - copy))
    for cluster in (flat, H100):
        total, _ = predict.simulate(kernels, cluster)
        parts = total.compute + total.memory + total.exposed_communication + total.launches
        assert parts == pytest.approx(total.total)
        found = predict.terms_of(kernels, cluster)
        assert sum(s for s, _ in found.values()) == pytest.approx(parts + total.empty_blocks)
        assert all(0 <= guessed <= seconds for seconds, guessed in found.values())
    by_flops, _ = assumed.kernel_seconds(kernels[3], sheet)
    assert by_flops == pytest.approx(2 * 49152 * 768 * 768 / (989.4e12 * fractions["matmul"]))


def test_launches_and_empty_blocks(kernels, monkeypatch):
    """Record 29: 192 documents in 24 rows of 2,048, so 168 slots without a token, of 16 tiles and 6
    heads each."""
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    runs = sum(kernel.runs for kernel in kernels if not kernel.collective)
    assert predict.simulate(kernels, H100)[0].launches == pytest.approx(runs * predict.GAP)
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_enable_command_buffer= --xla_gpu_autotune_level=0")
    total, _ = predict.simulate(kernels, H100)
    assert total.launches == pytest.approx(runs * predict.GAP_WITHOUT_GRAPHS)
    # one call, by lanes; seven blocks without work for each with work are in what was measured
    blocks = 191 * 384 * 6 - 7 * 384 * 6
    assert total.empty_blocks == pytest.approx(blocks * terms.EMPTY_BLOCK / 132)
    assert predict.launch_gap(parse_target("v6ex8")) == 0
    config = '{"cudnn_fmha_backend_config":{"intermediate_tensor_shape":'
    config += '{"dimensions":["24","6","2048","2048"]},'
    config += '"mask_type":"PADDING_CAUSAL","sliding_window_length":1409,"max_seg_per_batch":8}}'
    call = kernels[0].instruction._replace(
        target="__cudnn$fmhaSoftmaxBackward", arrays=(hlo.Array("bf16", (24, 6, 2048, 128)),),
        attributes=f"backend_config={config}",
    )  # fmt: skip
    # a large kernel and two small ones, each half of it
    assert attention.empty_blocks(call) == 2 * 168 * 16 * 6
    idle = kernels[0]._replace(collective=None, runs=11, empty_blocks=attention.empty_blocks(call))
    assert terms.empty_seconds(idle, H100) == pytest.approx(
        2 * 168 * 16 * 6 * terms.EMPTY_BLOCK / 132
    )
    seen = attention.seen_of(call, 1.0, 2048)
    assert seen.blocks == 2 * 24 * 16 * 6 and seen.packed
    assert terms.empty_seconds(idle._replace(seen=seen), H100) == 0  # seven of eight slots
    whole = predict.simulate([idle], H100)[0]
    assert whole.expected == pytest.approx(whole.total + whole.empty_blocks)


def test_nodes_slow_a_ring_down():
    [collective] = hlo.collectives(TEXT)
    inside = assumed.collective_seconds(collective, H100)
    across = assumed.collective_seconds(
        collective._replace(members=tuple(range(64))), parse_target("h100x8x8")
    )
    by_network = collective.bytes * 63 / 64 / (8 * 50e9 * assumed.FRACTIONS["communication"])
    assert across == pytest.approx(by_network + assumed.LATENCY + 7 * assumed.HOP)
    assert across > inside
    # One GPU of each of four nodes: neighbours of none, so one adapter a node.
    strided = assumed.collective_seconds(
        collective._replace(members=(0, 8, 16, 24)), parse_target("h100x8x4")
    )
    by_network = collective.bytes * 3 / 4 / (50e9 * assumed.FRACTIONS["communication"])
    assert strided == pytest.approx(by_network + assumed.LATENCY + 3 * assumed.HOP)
    twice = assumed.collective_seconds(collective._replace(kind="all-reduce"), H100)
    assert twice - assumed.LATENCY == pytest.approx(2 * (inside - assumed.LATENCY))


def test_the_range_holds_published_times():
    """At least five of six, by tables and by flat rates; it is as wide as their errors make it."""
    for cluster in (H100, parse_target("rtx4090x1")):
        rows = predict.calibration(cluster)
        low, high = predict.predicted_range(1.0, cluster)
        ratios = [row["measured_ms"] / row["predicted_ms"] for row in rows]
        assert len(rows) == 6 and sum(low < ratio < high for ratio in ratios) >= 5
        spread = math.sqrt(sum(math.log(ratio) ** 2 for ratio in ratios) / 6)
        assert math.log(high) == pytest.approx(1.44 * spread) == pytest.approx(-math.log(low))
