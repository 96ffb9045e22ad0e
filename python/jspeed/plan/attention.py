"""FLOPs, workspace and idle blocks of cuDNN's attention, which HLO does not state.

Each pair of a query and a key that mask, window and longest document leave counts, once for each
matmul of the kernel: 2 forward, 5 backward (scores are recomputed).
"""

import json
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
    packed: bool = False  # documents
    blocks: int = 0  # of queries with work, in all kernels that have empty ones


def flops_of(op: Instruction, max_doc_len: int | None) -> float:
    """FLOPs of one call."""
    config = _fmha(op)
    batch, heads, queries, keys = map(int, config["intermediate_tensor_shape"]["dimensions"])
    width = op.arrays[0].dims[-1]
    packed = int(config["max_seg_per_batch"]) > 1
    seen = float(keys)
    if "CAUSAL" in config["mask_type"]:
        lane = Stage(steps=1, lane_len=queries, max_doc_len=max_doc_len if packed else None)
        seen = mean_context(lane, int(config["sliding_window_length"]) or None)
    return MATMULS[CUDNN[op.target]] * 2 * batch * heads * queries * seen * width


def seen_of(op: Instruction, flops: float, max_doc_len: int | None) -> Seen:
    """What a call with these exact ``flops`` computes, in whole tiles."""
    call = call_of(op)
    document = min(call.length, max_doc_len or call.length) if call.packed else call.length
    window = call.window or call.length
    keys = float(call.length)
    if call.causal:
        keys = _tiles(call.length, document, window) * TILE**2 / call.length
    rows = call.documents // int(_fmha(op)["max_seg_per_batch"])
    exact = 2 * MATMULS[CUDNN[op.target]] * rows * call.heads * call.length * call.width
    kernels = EMPTY_KERNELS["backward" if call.backward else "forward"]
    blocks = kernels * rows * call.heads * -(-call.length // TILE)
    return Seen(call.width, keys, max(flops, exact * keys), call.backward, call.packed, blocks)


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

    A kernel has one for every tile of queries of every document's slot, as if each were as long as
    a row of the arrays; those of as many slots as there are rows have a token. Kernels: see
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


def _tiles(length: int, document: int, window: int) -> int:
    """Pairs of a tile of queries and one of keys that it sees, of a lane of documents."""
    starts = range(0, length, TILE)
    firsts = (max(start // document * document, start - window + 1) for start in starts)
    ends = (min(start + TILE, length) for start in starts)
    return sum(-(-end // TILE) - first // TILE for first, end in zip(firsts, ends, strict=True))


def _fmha(op: Instruction) -> dict:
    """What XLA tells cuDNN about one attention call."""
    config, _ = json.JSONDecoder().raw_decode(op.attributes.partition("backend_config=")[2])
    return config["cudnn_fmha_backend_config"]
