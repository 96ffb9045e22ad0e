"""FLOPs of attention custom calls, which HLO does not contain: cuDNN's, jspeed's own, splash attention's on TPUs.

Attention counts the keys that mask, window and longest document leave: 2 matmuls forward, 5 backward, which recomputes
the scores. jspeed's own attention kernels count whole blocks of keys, as they multiply them, and 7 matmuls backward:
scores are recomputed in each of two kernels. So does splash attention on TPUs, whose blocks do not end with documents,
and what it reads again for each block counts again. Composed heads count all blocks that a window reaches, masked or
not, in 2 matmuls forward and 7 backward; the pointer counts as own attention, in 1 and 4.
"""

import json
import math
import re
from collections.abc import Mapping
from typing import NamedTuple

from jspeed.plan.hlo import Instruction
from jspeed.plan.schema import Kind
from jspeed.sizes import mean_context
from jspeed.stage import Stage

CUDNN: dict[str, Kind] = {
    "__cudnn$fmhaSoftmax": "attention_forward",
    "__cudnn$fmhaSoftmaxBackward": "attention_backward",
}
TILE = 128  # tokens of a block of cuDNN's kernels for Hopper
MATMULS = {"attention_forward": 2, "attention_backward": 5}
EMPTY_KERNELS = {"forward": 1, "backward": 2}  # of cuDNN: a large one, and backward two small ones, each half of it
# The kernels of model/kernels/fused_attention.py: their names, and how many matmuls they do for each pair of blocks.
TRITON = "__gpu$xla.gpu.triton"
OWN = re.compile(r"attention_(forward|dq|dk_dv)_(packed|causal)_window(\d+)_blocks(\d+)x(\d+)")
OWN_MATMULS = {"forward": 2, "dq": 3, "dk_dv": 4}
# Those of model/kernels/composed_heads.py, for a block of tokens and all that it visits.
COMPOSED = re.compile(r"composed_heads_(forward|dmixed|dq|dk_dv)_(\d+)x(\d+)_blocks(\d+)x(\d+)")
COMPOSED_MATMULS = {"forward": 2, "dmixed": 1, "dq": 3, "dk_dv": 3}
# Those of model/kernels/pointer_attention.py: one head, whose values are no matrix.
POINTER = re.compile(r"pointer_(forward|dq|dk)_(\d+)_window(\d+)_blocks(\d+)x(\d+)")
POINTER_MATMULS = {"forward": 1, "dq": 2, "dk": 2}
# JAX's kernels for TPUs: the scope that model/kernels/splash_attention.py names, then the kernel's own name.
TPU = "tpu_custom_call"
SPLASH = re.compile(r"splash_window(\d+)_blocks(\d+)\b.*splash_mha_(fwd|dq|dkv)")
SPLASH_MATMULS = {"fwd": 2, "dq": 3, "dkv": 4}


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
        what = f"{self.documents:,} {'documents' if self.packed else 'lanes'} of up to {self.length:,} tokens"
        return f"{way}, {what}, {self.heads} heads of {self.width}, window {self.window or 'none'}"


def kind_of(step: Instruction) -> Kind | None:
    """Whether a kernel is ``attention_forward``, ``attention_backward``, or neither."""
    if step.target == TRITON:
        for pattern in (OWN, COMPOSED, POINTER):
            if match := pattern.search(step.attributes):
                return "attention_forward" if match[1] == "forward" else "attention_backward"
    if step.target == TPU and (match := SPLASH.search(step.op_name)):
        return "attention_forward" if match[3] == "fwd" else "attention_backward"
    return CUDNN.get(step.target)


def flops_of(kind: str, step: Instruction, max_doc_len: int | None, windows: Mapping[int, int] | None = None) -> float:
    """FLOPs of one call of cuDNN attention, of one of jspeed's own kernels, or of splash attention.

    ``windows`` maps windows that were compiled to others; those of composed heads and of the pointer are not among
    them and stay.
    """
    if step.target == TPU:
        return _splash(step)[0]
    if step.target == TRITON:
        if match := COMPOSED.search(step.attributes):
            return _composed(step, match)
        if match := POINTER.search(step.attributes):
            return _pointer(step, match, max_doc_len)
        return _own(step, max_doc_len, windows or {})
    config = _fmha(step)
    batch, heads, queries, keys = map(int, config["intermediate_tensor_shape"]["dimensions"])
    width = step.arrays[0].dims[-1]
    window = int(config["sliding_window_length"])
    window = (windows or {}).get(window, window)
    packed = int(config["max_seg_per_batch"]) > 1
    seen = float(keys)
    if "CAUSAL" in config["mask_type"]:
        lane = Stage(steps=1, lane_len=queries, max_doc_len=max_doc_len if packed else None)
        seen = mean_context(lane, window or None)
    return MATMULS[kind] * 2 * batch * heads * queries * seen * width


def call_of(step: Instruction) -> Call:
    """What cuDNN is asked for by one of its calls."""
    config = _fmha(step)
    batch, heads, queries, _ = map(int, config["intermediate_tensor_shape"]["dimensions"])
    slots = int(config["max_seg_per_batch"])
    backward, causal = CUDNN[step.target] == "attention_backward", "CAUSAL" in config["mask_type"]
    window = int(config["sliding_window_length"])
    return Call(backward, batch * slots, heads, queries, step.arrays[0].dims[-1], slots > 1, causal, window)


def empty_blocks(step: Instruction) -> int:
    """Thread blocks of a call of cuDNN's attention that find nothing to do, as many as take an SM to themselves.

    There is one for every tile of queries of every slot for a document, as if each were as long as a row of the arrays;
    those of as many slots as there are rows have a token. The backward pass is three kernels: compute_dot_do_o_ragged
    (sums of dO x O), the gradients, convert_dq_to_16bits_ragged (dQ's conversion). In cuDNN 9.28's code for sm_90 the
    large kernels, forward and backward, have 384 threads of 168 registers, so that an SM holds one block. The small
    ones have 32 registers a thread and 1 kB of shared memory: whatever their blocks' size, at most 1,024 threads, an SM
    holds two or more. They count as two, as FlashAttention 3 bounds its own (hopper/flash_bwd_preprocess_kernel.h).
    """
    if step.target not in CUDNN:
        return 0
    call = call_of(step)
    rows = call.documents // int(_fmha(step)["max_seg_per_batch"])
    kernels = EMPTY_KERNELS["backward" if call.backward else "forward"]
    return kernels * (call.documents - rows) * call.heads * -(-call.length // TILE)


def workspace_bytes(capability: tuple[int, int], documents: int, heads: int, length: int, width: int) -> int:
    """Bytes of workspace of cuDNN's backward pass over ``documents`` slots of ``length`` tokens each, packed or not.

    dQ's sum, twice before Hopper, and one number a query, fp32: what cuDNN's plans ask for, 9.19 and 9.28 for Hopper
    and Blackwell, 9.28 for Ampere and Ada, of head widths 64 to 256, to 50 kB and 512 bytes a document (``make
    test-cudnn``). The forward pass asks for none.
    """
    sums = 1 if capability >= (9, 0) else 2
    return 4 * documents * heads * length * (sums * width + 1)


def workspace(step: Instruction) -> int:
    """Bytes of scratch memory of a call of cuDNN's attention: its last result, which nothing reads."""
    last = step.arrays[-1] if step.target in CUDNN else None
    return last.bytes if last and last.dtype == "u8" else 0


def read_again(step: Instruction) -> int:
    """Bytes that a call reads more often than once: splash attention reads a block of two arrays for each pair."""
    return _splash(step)[1] if step.target == TPU else 0


def _own(step: Instruction, max_doc_len: int | None, windows: Mapping[int, int]) -> float:
    """All of every pair of blocks that are visited, if all documents have ``max_doc_len`` tokens."""
    match = OWN.search(step.attributes)
    assert match
    lanes, length, heads, width = step.arrays[0].dims
    window, own, visited = map(int, match.groups()[2:])
    window = windows.get(window, window) or length
    document = min(length, max_doc_len or length) if match[2] == "packed" else length
    pairs = _pairs(match[1] == "dk_dv", length, document, window, own, visited)
    return OWN_MATMULS[match[1]] * 2 * lanes * heads * width * own * visited * pairs


def _composed(step: Instruction, match: re.Match[str]) -> float:
    """All that every block of tokens visits, before the lane and after it too; the first result is ``[B, T, ...]``."""
    lanes, length = step.arrays[0].dims[:2]
    heads, width, own, visited = map(int, match.groups()[1:])
    return COMPOSED_MATMULS[match[1]] * 2 * lanes * heads * width * -(-length // own) * own * visited


def _pointer(step: Instruction, match: re.Match[str], max_doc_len: int | None) -> float:
    """As :func:`_own`; every result is ``[B, T, ...]``, and the window does not count the query."""
    lanes, length = step.arrays[0].dims[:2]
    width, window, own, visited = map(int, match.groups()[1:])
    pairs = _pairs(match[1] == "dk", length, min(length, max_doc_len or length), window + 1, own, visited)
    return POINTER_MATMULS[match[1]] * 2 * lanes * width * own * visited * pairs


def _pairs(by_keys: bool, length: int, document: int, window: int, own: int, visited: int) -> int:
    """Pairs of a block of ``own`` queries and one of ``visited`` keys that it sees; of keys and queries ``by_keys``."""
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


def _splash(step: Instruction) -> tuple[int, int]:
    """FLOPs of a call of splash attention, and bytes read again: a block of two arrays for each pair of blocks."""
    match = SPLASH.search(step.op_name)
    assert match
    window, block = int(match[1]), int(match[2])
    *rows, length, width = next(array.dims for array in step.arrays if array.dtype == "bf16")
    pairs = _pairs(match[3] == "dkv", length, length, window or length, block, block)
    channels = math.prod(rows) * width
    return SPLASH_MATMULS[match[3]] * 2 * channels * block * block * pairs, 4 * channels * (pairs * block - length)


def _fmha(step: Instruction) -> dict:
    """What XLA tells cuDNN about one attention call."""
    config, _ = json.JSONDecoder().raw_decode(step.attributes.partition("backend_config=")[2])
    return config["cudnn_fmha_backend_config"]
