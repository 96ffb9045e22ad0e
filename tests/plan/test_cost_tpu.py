"""Cost of TPU kernels: HLO that XLA wrote for a v6e against arithmetic by hand."""

import pytest

from jspeed.plan import cost

# Shortened from a program for TPU v6e: a matmul with its fused epilogue, one that is batched, one
# contracted over two.
TPU_TEXT = """HloModule jit_f, is_scheduled=true, num_partitions=8

%fused.1 (p.0: bf16[1024,768], p.1: bf16[768,3072]) -> bf16[1024,3072] {
  %p.0 = bf16[1024,768]{1,0:T(8,128)(2,1)} parameter(0)
  %p.1 = bf16[768,3072]{1,0:T(8,128)(2,1)} parameter(1)
  ROOT %convolution.1 = bf16[1024,3072]{1,0:T(8,128)(2,1)} convolution(%p.0, %p.1), \
dim_labels=bf_io->bf
}

ENTRY %main (x: bf16[1024,768], w: bf16[768,3072], b: bf16[16,512,256], g: bf16[4,256,768]) -> \
bf16[1024,3072] {
  %x = bf16[1024,768]{1,0:T(8,128)(2,1)} parameter(0)
  %w = bf16[768,3072]{1,0:T(8,128)(2,1)} parameter(1)
  %b = bf16[16,512,256]{2,1,0:T(8,128)(2,1)} parameter(2)
  %g = bf16[4,256,768]{2,1,0:T(8,128)(2,1)} parameter(3)
  %batched = bf16[16,512,512]{2,1,0} convolution(%b, %b), \
window={size=16 stride=15 lhs_dilate=16}, dim_labels=0bf_0oi->0bf
  %both = bf16[1,768,768]{2,1,0} convolution(%g, %g), window={size=4}, dim_labels=0fb_0io->0bf
  ROOT %fusion = bf16[1024,3072]{1,0} fusion(%x, %w), kind=kOutput, calls=%fused.1
}
"""


def test_matmuls_that_a_tpu_writes_as_convolutions():
    batched, both, fused = cost.kernels(TPU_TEXT)
    assert (batched.flops, batched.dims) == (2 * 16 * 512 * 256 * 512, (16, 512, 256, 512))
    assert (both.flops, both.dims) == (2 * 4 * 256 * 768 * 768, (1, 768, 4 * 256, 768))
    assert (fused.flops, fused.dims, fused.dtype) == (
        2 * 1024 * 768 * 3072,
        (1, 1024, 768, 3072),
        "bf16",
    )
    assert {kernel.kind for kernel in (batched, both, fused)} == {"matmul"}


# A loop over layers as TPU v6e's program has it: no trip count is written.
TPU_LOOP = """HloModule jit_f, is_scheduled=true

%body (a: (s32[], bf16[256,256])) -> (s32[], bf16[256,256]) {
  %a = (s32[]{:T(128)}, bf16[256,256]{1,0}) parameter(0)
  %one = s32[]{:T(128)} constant(1)
  %i = s32[]{:T(128)} get-tuple-element(%a), index=0
  %x = bf16[256,256]{1,0} get-tuple-element(%a), index=1
  %next = s32[]{:T(128)} add(%i, %one)
  %y = bf16[256,256]{1,0} convolution(%x, %x), dim_labels=bf_io->bf
  ROOT %out = (s32[]{:T(128)}, bf16[256,256]{1,0}) tuple(%next, %y)
}

%below (b: (s32[], bf16[256,256])) -> pred[] {
  %twelve = s32[]{:T(128)} constant(12)
  %b = (s32[]{:T(128)}, bf16[256,256]{1,0}) parameter(0)
  %j = s32[]{:T(128)} get-tuple-element(%b), index=0
  ROOT %lt = pred[]{:T(512)} compare(%j, %twelve), direction=LT, backend_config={"flag_configs":[]}
}

ENTRY %main (z: (s32[], bf16[256,256])) -> (s32[], bf16[256,256]) {
  %z = (s32[]{:T(128)}, bf16[256,256]{1,0}) parameter(0)
  ROOT %while = (s32[]{:T(128)}, bf16[256,256]{1,0}) while(%z), condition=%below, body=%body
}
"""


@pytest.mark.parametrize(
    ("text", "times"),
    [
        (TPU_LOOP, 12),
        (TPU_LOOP.replace("direction=LT", "direction=NE"), 1),
        (TPU_LOOP.replace("%twelve)", "%j)"), 1),
    ],
)
def test_loops_of_a_tpu_run_as_often_as_their_condition_says(text, times):
    assert [kernel.runs for kernel in cost.kernels(text) if kernel.flops] == [times]


# A layer's weights of a stack, cut out by a fusion within the matmul's, and activations that stay
# on the chip.
TPU_LAYER = """HloModule jit_f, is_scheduled=true

%cut (p.0: bf16[12,64,64], p.1: s32[]) -> bf16[64,64] {
  %p.0 = bf16[12,64,64]{2,1,0:T(8,128)(2,1)} parameter(0)
  %p.1 = s32[]{:T(128)S(6)} parameter(1)
  %slice = bf16[1,64,64]{2,1,0} dynamic-slice(%p.0, %p.1, %p.1, %p.1), dynamic_slice_sizes={1,64,64}
  ROOT %flat = bf16[64,64]{1,0} bitcast(%slice)
}

%layer (x.1: bf16[32,64], w.1: bf16[12,64,64], i.1: s32[]) -> bf16[32,64] {
  %x.1 = bf16[32,64]{1,0:T(8,128)(2,1)S(1)} parameter(0)
  %w.1 = bf16[12,64,64]{2,1,0:T(8,128)(2,1)} parameter(1)
  %i.1 = s32[]{:T(128)S(6)} parameter(2)
  %fusion.1 = bf16[64,64]{1,0} fusion(%w.1, %i.1), kind=kLoop, calls=%cut
  ROOT %convolution.1 = bf16[32,64]{1,0} convolution(%x.1, %fusion.1), dim_labels=bf_io->bf
}

ENTRY %main (x: bf16[32,64], w: bf16[12,64,64], i: s32[]) -> bf16[32,64] {
  %x = bf16[32,64]{1,0:T(8,128)(2,1)} parameter(0)
  %w = bf16[12,64,64]{2,1,0:T(8,128)(2,1)} parameter(1)
  %i = s32[]{:T(128)} parameter(2)
  %copy-start = (bf16[32,64]{1,0:T(8,128)(2,1)S(1)}, bf16[32,64]{1,0:T(8,128)(2,1)}, u32[]{:S(2)}) \
copy-start(%x)
  %copy-done = bf16[32,64]{1,0:T(8,128)(2,1)S(1)} copy-done(%copy-start)
  %y = bf16[32,64]{1,0:T(8,128)(2,1)S(1)} fusion(%copy-done, %w, %i), kind=kOutput, calls=%layer
  ROOT %z = bf16[32,64]{1,0:T(8,128)(2,1)} copy(%y)
}
"""


def test_bytes_of_a_tpu_are_those_off_the_chip():
    copied, layer, out = cost.kernels(TPU_LAYER)
    x, w = 2 * 32 * 64, 2 * 64 * 64
    assert [copied.bytes, layer.bytes, out.bytes] == [x + 4, w + 4, x]
