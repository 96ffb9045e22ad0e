"""FLOPs, workspace and idle blocks of attention's custom calls, which HLO does not state.

Each pair of a query and a key that is computed counts, once for each matmul of the kernel:

- cuDNN: keys that mask, window and longest document leave; 2 matmuls forward, 5 backward (scores
  are recomputed).
- own kernels: whole blocks of such keys; 2 and 7 (scores are recomputed in both backward kernels).
- splash attention (TPUs): the same, but documents end no block; a block is read again for each
  pair.
- the pointer: as own kernels; 1 and 4.
"""

import json
import math
import re
from typing import NamedTuple

from jspeed.fields import Stage
from jspeed.plan.hlo import Instruction
from jspeed.plan.schema import Kind
from jspeed.record.sizes import mean_context

CUDNN: dict[str, Kind] = {
    "__cudnn$fmhaSoftmax": "attention_forward",
    "__cudnn$fmhaSoftmaxBackward": "attention_backward",
}
TILE = 128  # tokens of a block of cuDNN's kernels for Hopper
MATMULS = {"attention_forward": 2, "attention_backward": 5}
# cuDNN's kernels whose blocks take an SM to themselves. Backward also has two small ones, of whose
# blocks an SM holds two or more (cuDNN 9.28 for sm_90: compute_dot_do_o_ragged,
# convert_dq_to_16bits_ragged): together they count as one.
EMPTY_KERNELS = {"forward": 1, "backward": 2}
TRITON = "__gpu$xla.gpu.triton"  # own kernels for GPUs
TPU = "tpu_custom_call"  # JAX's splash attention
# Names of kernels, as fused_attention.py, pointer_attention.py and splash_attention.py of
# model/kernels/ give them: a kernel takes blocks of ``own`` tokens, each of which visits blocks of
# ``visited`` tokens.
BLOCKS = r"blocks(?P<own>\d+)x(?P<visited>\d+)"
OWN = re.compile(
    r"attention_(?P<kernel>forward|dq|dk_dv)_(?P<mask>packed|causal)"
    rf"_window(?P<window>\d+)_{BLOCKS}"
)
POINTER = re.compile(
    rf"pointer_(?P<kernel>forward|dq|dk)_(?P<width>\d+)_window(?P<window>\d+)_{BLOCKS}"
)
SPLASH = re.compile(
    r"splash_window(?P<window>\d+)_blocks(?P<own>\d+)\b.*splash_mha_(?P<kernel>fwd|dq|dkv)"
)
BLOCK_MATMULS = {  # of each kernel, for a pair of blocks
    OWN: {"forward": 2, "dq": 3, "dk_dv": 4},
    POINTER: {"forward": 1, "dq": 2, "dk": 2},
    SPLASH: {"fwd": 2, "dq": 3, "dkv": 4},
}


class Call(NamedTuple):
    """A call of cuDNN's attention: the graph that it is, but for scale and dropout."""

    backward: bool
    documents: int  # slots: lanes, or rows of a lane, by the documents of each
    heads: int
    length: int  # tokens of a slot
    width: int
    packed: bool
    causal: bool
    window: int  # 0: none

    @property
    def words(self) -> str:
        """The call in words."""
        way = "backward" if self.backward else "forward"
        what = (
            f"{self.documents:,} {'documents' if self.packed else 'lanes'} of up to {self.length:,}"
            " tokens"
        )
        return f"{way}, {what}, {self.heads} heads of {self.width}, window {self.window or 'none'}"


class Seen(NamedTuple):
    """What a call computes where it computes whole tiles of scores."""

    width: int  # of a head
    keys: float  # of a query, in the tiles that it visits
    flops: float  # of those tiles
    backward: bool


class Blocks(NamedTuple):
    """What a call computes of a kernel that computes whole blocks."""

    matmuls: int  # for a pair of blocks
    channels: int  # of a token, in all lanes and heads
    length: int  # tokens of a lane
    own: int  # tokens of a block of queries, or of keys in the backward pass
    visited: int  # tokens of a block that it visits
    pairs: int  # of blocks

    @property
    def flops(self) -> int:
        """FLOPs of a call."""
        return self.matmuls * 2 * self.channels * self.own * self.visited * self.pairs


def kind_of(op: Instruction) -> Kind | None:
    """Whether a kernel is ``attention_forward``, ``attention_backward``, or neither."""
    if match := _match(op):
        return (
            "attention_forward" if match["kernel"] in ("forward", "fwd") else "attention_backward"
        )
    return CUDNN.get(op.target)


def flops_of(op: Instruction, max_doc_len: int | None) -> float:
    """FLOPs of one call of cuDNN attention, of one of jspeed's own kernels, or of splash
    attention."""
    if match := _match(op):
        return _blocks(op, match, max_doc_len).flops
    config = _fmha(op)
    batch, heads, queries, keys = map(int, config["intermediate_tensor_shape"]["dimensions"])
    width = op.arrays[0].dims[-1]
    packed = int(config["max_seg_per_batch"]) > 1
    seen = float(keys)
    if "CAUSAL" in config["mask_type"]:
        lane = Stage(steps=1, lane_len=queries, max_doc_len=max_doc_len if packed else None)
        seen = mean_context(lane, int(config["sliding_window_length"]) or None)
    return MATMULS[CUDNN[op.target]] * 2 * batch * heads * queries * seen * width


def seen_of(op: Instruction, flops: float, max_doc_len: int | None) -> Seen | None:
    """What a call of cuDNN's attention with these exact ``flops`` computes, in whole tiles; None of
    other kernels."""
    if op.target not in CUDNN:
        return None
    call = call_of(op)
    document = min(call.length, max_doc_len or call.length) if call.packed else call.length
    window = call.window or call.length
    pairs = _pairs(False, call.length, document, window, TILE, TILE) if call.causal else 0
    keys = pairs * TILE**2 / call.length if call.causal else call.length
    rows = call.documents // int(_fmha(op)["max_seg_per_batch"])
    exact = 2 * MATMULS[CUDNN[op.target]] * rows * call.heads * call.length * call.width
    return Seen(call.width, keys, max(flops, exact * keys), call.backward)


def call_of(op: Instruction) -> Call:
    """What cuDNN is asked for by one of its calls."""
    config = _fmha(op)
    batch, heads, queries, _ = map(int, config["intermediate_tensor_shape"]["dimensions"])
    slots = int(config["max_seg_per_batch"])
    backward, causal = CUDNN[op.target] == "attention_backward", "CAUSAL" in config["mask_type"]
    window = int(config["sliding_window_length"])
    return Call(
        backward, batch * slots, heads, queries, op.arrays[0].dims[-1], slots > 1, causal, window
    )


def empty_blocks(op: Instruction) -> int:
    """Thread blocks of a call of cuDNN's attention that find nothing to do, as many as take an SM
    to themselves.

    A kernel has one for every tile of queries of every slot for a document, as if each were as long
    as a row of the arrays; those of as many slots as there are rows have a token. Kernels: see
    EMPTY_KERNELS.
    """
    if op.target not in CUDNN:
        return 0
    call = call_of(op)
    rows = call.documents // int(_fmha(op)["max_seg_per_batch"])
    kernels = EMPTY_KERNELS["backward" if call.backward else "forward"]
    return kernels * (call.documents - rows) * call.heads * -(-call.length // TILE)


def workspace_bytes(
    capability: tuple[int, int], documents: int, heads: int, length: int, width: int
) -> int:
    """Bytes of workspace of cuDNN's backward pass over ``documents`` slots of ``length`` tokens
    each, packed or not.

    The sum of dQ, twice before Hopper, and one number a query, fp32. cuDNN itself asks for at most
    50 kB and 512 bytes a document more (``make test-cudnn``). The forward pass asks for none.
    """
    sums = 1 if capability >= (9, 0) else 2
    return 4 * documents * heads * length * (sums * width + 1)


def workspace(op: Instruction) -> int:
    """Bytes of scratch memory of a call of cuDNN's attention: its last result, which nothing
    reads."""
    last = op.arrays[-1] if op.target in CUDNN else None
    return last.bytes if last and last.dtype == "u8" else 0


def read_again(op: Instruction) -> int:
    """Bytes that a call reads more often than once: splash attention reads a block of two arrays
    for each pair."""
    if op.target != TPU or not (match := _match(op)):
        return 0
    blocks = _blocks(op, match, None)
    return 4 * blocks.channels * (blocks.pairs * blocks.own - blocks.length)


def _match(op: Instruction) -> re.Match[str] | None:
    """What the name of a kernel that computes whole blocks says of it; None for all others."""
    if op.target == TPU:
        return SPLASH.search(op.op_name)
    patterns = (OWN, POINTER) if op.target == TRITON else ()
    return next((match for pattern in patterns if (match := pattern.search(op.attributes))), None)


def _blocks(op: Instruction, match: re.Match[str], max_doc_len: int | None) -> Blocks:
    """The blocks of a call, if all documents have ``max_doc_len`` tokens; own kernels' results are
    ``[B, T, ...]``."""
    named = match.groupdict()
    own = int(match["own"])
    visited, window = int(named.get("visited", own)), int(named.get("window", 0))
    if match.re is SPLASH:
        *rows, length, width = next(array.dims for array in op.arrays if array.dtype == "bf16")
        channels = math.prod(rows) * width
    else:
        lanes, length, *rest = op.arrays[0].dims
        channels = lanes * (math.prod(rest) if match.re is OWN else int(match["width"]))
    document = (
        min(length, max_doc_len or length)
        if match.re is POINTER or named.get("mask") == "packed"
        else length
    )
    by_keys = match["kernel"] in ("dk_dv", "dk", "dkv")
    # the pointer's do not count the query
    keys = window + 1 if match.re is POINTER else window or length
    pairs = _pairs(by_keys, length, document, keys, own, visited)
    return Blocks(BLOCK_MATMULS[match.re][match["kernel"]], channels, length, own, visited, pairs)


def _pairs(by_keys: bool, length: int, document: int, window: int, own: int, visited: int) -> int:
    """Pairs of a block of ``own`` queries and one of ``visited`` keys that it sees; of keys and
    queries ``by_keys``."""
    pairs = 0
    for start in range(0, length, own):
        end = min(start + own, length)
        if by_keys:  # blocks of queries, up to the last one that sees the last key
            last = min((end - 1) // document * document + document, length, end - 1 + window) - 1
            pairs += last // visited + 1 - start // visited
        else:
            first = max(start // document * document, start - window + 1)
            pairs += -(-end // visited) - first // visited
    return pairs


def _fmha(op: Instruction) -> dict:
    """What XLA tells cuDNN about one attention call."""
    config, _ = json.JSONDecoder().raw_decode(op.attributes.partition("backend_config=")[2])
    return config["cudnn_fmha_backend_config"]
