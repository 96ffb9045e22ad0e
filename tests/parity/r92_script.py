"""Record 92 on a CPU: its script, from the log of a certified run, at a small size, kernels and
systems replaced."""

import hashlib
import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from . import r92_kernels
from .original import Original, Replacement, text_of

LOG = "records/track_1_short/2026-08-30_ANVIL2/this_pr/01b2f094-4536-479c-b0dd-cb14eba4844c.txt"
# The start of each file's sha256, as the record's README publishes it.
SHA256 = {
    "train_gpt.py": "c6da246b1d87a525",
    "triton_kernels.py": "71728386ec63079b",
    "anvil_attn_kernels.py": "5882b11329fab39d",
    "bigram_kernels.py": "8cd6986fa68edc18",
    "fuse_tiny_kernels.py": "066ae2652648c6ba",
    "value_embed_op.py": "7f2e7f2e3d548f6e",
}
WORLD = 2  # one process gathers nothing, and so never lands rows of n-grams


@dataclass(frozen=True)
class Size:
    """What is smaller than in the record. ``steps`` are those that shape the schedule, before
    ``growth`` more in stage 2 and the extension; lanes have ``unit`` times 8, 16, 24, 20 and 8
    tokens, documents ``documents``."""

    vocab: int = 512
    bos: int = 500
    head: int = 16
    mlp: int = 128
    ngrams: int = 4096
    mudd: int = 16
    block: int = 8
    unit: int = 20
    documents: tuple[int, int, int] = (96, 144, 152)
    segment: int = 136
    eval_len: int = 512
    columns: tuple[int, int, int] = (288, 368, 416)
    steps: int = 28
    growth: int = 4
    extension: int = 4
    slow_tables: int = 12
    warmup: int = 6
    end: int = 5
    engage: int = 20
    last_steps: tuple[int, int] = (22, 16)

    @property
    def width(self) -> int:
        return 6 * self.head

    @property
    def ends(self) -> list[int]:
        """Where the record's five stages end."""
        shares = np.array([0.2854, 0.3209, 0.3931])
        a, b = (round(share * self.steps) for share in np.cumsum(shares / shares.sum())[:2])
        c = round((1 - 0.06) * self.steps) + self.growth
        return [a, b, c, self.steps + self.growth, self.steps + self.growth + self.extension]

    def sets(self) -> list[str]:
        """The fields of our recipe at this size."""
        a, b, c, d, e = self.ends
        ramp = next(step for step in range(b, c) if (step - b) * 3 // (c - b) == 2)
        quarters = {a: 0.20}
        for step in range(a, b):
            quarter = int((step - a) / (b - a) * 4)
            if len(quarters) < quarter + 1:
                quarters[step] = (0.20, 0.15, 0.10, 0.05)[quarter]
        cut = [self.documents[n] for n in (0, 1, 1, 2, 2, 2, 2)]
        fields: dict[str, Any] = dict(
            VOCAB=self.vocab, BOS=self.bos, WIDTH=self.width, MLP_WIDTH=self.mlp
        )
        fields |= dict(NGRAMS=self.ngrams, MUDD_WIDTH=self.mudd, BLOCK=self.block, LANES=WORLD)
        fields |= dict(
            STEPS=(a, self.slow_tables - a, b - self.slow_tables, ramp - b, c - ramp, d - c, e - d)
        )
        fields |= {
            "LANE_LENS": tuple(self.unit * n for n in (8, 16, 16, 24, 24, 20, 8)),
            "MAX_DOCS": (64,) * 7,
        }
        fields |= {"MAX_DOC_LENS": tuple(cut), "SEGMENT": self.segment}
        narrow, middle, wide = self.columns
        fields |= {"COLUMNS": (narrow,) * 3 + (middle, wide, self.vocab, self.vocab)}
        fields |= {"SHARES": ({0: 1.0}, {a: 0.5, b: 0.0}, {0: 0.25, a: 0.0})}
        fields |= {"PREFIX_SHARE": {0: 0.25, **quarters, b: 0.0}, "LAST_TIED": d | 1}
        fields |= {"MOMENTUM": {0: 0.85, self.warmup: 0.93, e - self.end: 0.93, e: 0.85}}
        fields |= {
            "RAILS": (self.engage, 0.85, 0.98, 0.4385),
            "COOLDOWN": {int(d * (1 - 0.80)): 0.0, d: 1.0},
        }
        long, short = self.last_steps
        fields |= {"LAST_STEPS": self.last_steps, "FORGET": 53 / short}
        fields |= {"EVAL_LEN": self.eval_len, "EVAL_TOKENS": 2 * WORLD * self.eval_len}
        fields |= {"COMPUTE": "float32", "FP8": "off", "OWN_KERNELS": "off"}
        return [f"{name}={value}" for name, value in fields.items()]


FULL = Size(
    steps=1122,
    growth=52,
    extension=20,
    slow_tables=336,
    warmup=240,
    end=50,
    engage=514,
    last_steps=(298, 250),
)


def has_log(clone: str) -> bool:
    """Whether the clone's newest commit has the log; those from before the record have not."""
    return not subprocess.run(
        ["git", "-C", clone, "cat-file", "-e", f"HEAD:{LOG}"], capture_output=True
    ).returncode


def files(clone: str) -> dict[str, str]:
    """Return the record's six files by name, out of the log; raise AssertionError unless they are
    those published."""
    first, *rest = re.split(r"\n\n-{40}\n# (\w+\.py)\n-{40}\n\n", text_of(clone, LOG))
    texts = {"train_gpt.py": first, **dict(zip(rest[::2], rest[1::2], strict=True))}
    # the log ends it with one more
    texts["value_embed_op.py"] = texts["value_embed_op.py"].rstrip("\n") + "\n"
    found = {name: hashlib.sha256(text.encode()).hexdigest()[:16] for name, text in texts.items()}
    assert found == SHA256, f"the log's files are not those of the record: {found}"
    return texts


def script(
    texts: Mapping[str, str], folder: Path, size: Size
) -> tuple[Original, list[list[np.ndarray]]]:
    """Execute the script up to its training loop in two processes: (the script, of each process the
    losses of next tokens in training, an array for each lane)."""
    found: list[list[np.ndarray]] = [[] for _ in range(WORLD)]

    def modules(rank: int) -> dict[str, Any]:
        made = r92_kernels.modules(dict(texts), found[rank], size)
        made["kernels"].eager = eager
        return made

    return Original(
        texts["train_gpt.py"], changes(size), folder=folder, world=WORLD, modules=modules
    ), found


def changes(size: Size) -> list[Replacement]:
    """What is replaced in ``train_gpt.py``: sizes, what only GPUs have, and the warm-up."""
    half, cap = size.head // 2, size.segment
    narrow, middle, wide = size.columns
    long, short = size.last_steps
    return [
        # Sizes
        ("vocab_size=50257,", f"vocab_size={size.vocab},"),
        ("torch.full((50304,)", f"torch.full(({size.vocab},)"),
        ("np.full(50304,", f"np.full({size.vocab},"),
        ("head_dim=128,", f"head_dim={size.head},"),
        ("model_dim=768,", f"model_dim={size.width},"),
        ("bigram_dim: int = 768", f"bigram_dim: int = {size.width}"),
        ("NGRAM_VOCAB_SIZE = 84602880", f"NGRAM_VOCAB_SIZE = {size.ngrams}"),
        ("self.mlp_hdim = 2816", f"self.mlp_hdim = {size.mlp}"),
        ("mudd_dim = 64", f"mudd_dim = {size.mudd}"),
        ("mudd_gate_dim = 64", f"mudd_gate_dim = {size.mudd}"),
        ("rot_dim = 64 ", f"rot_dim = {half} "),
        ("else 64\n", f"else {half}\n"),
        (
            "self.d_qk == 64 and self.head_dim == 2 * 64",
            f"self.d_qk == {half} and self.head_dim == {size.head}",
        ),
        ("[:, :64, :]", f"[:, :{half}, :]", 2),
        ("[:, :, :64, :]", f"[:, :, :{half}, :]"),
        ("[:, :, :, :64, :]", f"[:, :, :, :{half}, :]", 2),
        ("[:, :, :64].reshape", f"[:, :, :{half}].reshape"),
        ("[..., :64]", f"[..., :{half}]", 2),
        ("self.num_heads * 64", f"self.num_heads * {half}", 5),
        ("self.num_heads, 64)", f"self.num_heads, {half})", 2),
        ("self.num_heads // 2, 64)", f"self.num_heads // 2, {half})"),
        ("_gpl, 128, _dim)", f"_gpl, {size.head}, _dim)"),
        ("Yarn(64,", f"Yarn({half},", 2),
        ("self.block_size = 128", f"self.block_size = {size.block}"),
        (" * 2048 * 8, ", f" * {size.unit * WORLD}, ", 5),
        ("train_max_seq_len=896", f"train_max_seq_len={size.documents[0]}"),
        ("train_max_seq_len=2048", f"train_max_seq_len={size.documents[1]}"),
        ("train_max_seq_len=3072", f"train_max_seq_len={size.documents[2]}", 3),
        ("VIRTUAL_SEQ_CAP = 2560 ", f"VIRTUAL_SEQ_CAP = {cap} "),
        ("VIRTUAL_SEQ_CAP % 128", f"VIRTUAL_SEQ_CAP % {size.block}"),
        (
            "{16384: 64, 32768: 96, 40960: 128, 49152: 128}",
            str({size.unit * n: 64 for n in (8, 16, 20, 24)}),
        ),
        ("val_tokens: int = 10485760", f"val_tokens: int = {2 * WORLD * size.eval_len}"),
        (
            "val_batch_size: int = 4 * 64 * 1024 * 8",
            f"val_batch_size: int = {WORLD * size.eval_len}",
        ),
        ("BOS_ID = 50256", f"BOS_ID = {size.bos}"),
        # A smaller vocabulary has the first of GPT-2's byte pairs.
        (
            "for b, tid in byte_to_id.items() if len(b)",
            f"for b, tid in byte_to_id.items() if tid < {size.bos} if len(b)",
        ),
        ("[10240, 10240, 10240, 32768, 32768]", f"[{narrow}, {narrow}, {narrow}, 0, 0]"),
        ("[14336, 14336, 24576]", f"[{middle}, {middle}, {wide}]"),
        ('"KX_STEPS", "1122"', f'"KX_STEPS", "{size.steps}"'),
        ("SCHEDULE_GROWTH_STEPS = 52", f"SCHEDULE_GROWTH_STEPS = {size.growth}"),
        (
            "num_extension_iterations: int = 20 ",
            f"num_extension_iterations: int = {size.extension} ",
        ),
        ("ADAM_PERIOD4_START = 336", f"ADAM_PERIOD4_START = {size.slow_tables}", 2),
        ("0.4385, 514", f"0.4385, {size.engage}"),
        (
            "beta_warmup_steps=240, beta_cooldown_steps=50",
            f"beta_warmup_steps={size.warmup}, beta_cooldown_steps={size.end}",
        ),
        ("TAIL_EMA_WINDOW = 298", f"TAIL_EMA_WINDOW = {long}"),
        ("_SHIPBLEND_K = 298", f"_SHIPBLEND_K = {long}"),
        ("TAIL_AVG_WINDOW = 250", f"TAIL_AVG_WINDOW = {short}"),
        # Two processes, a lane each.
        ("dtype=torch.uint16, pin_memory=True", "dtype=torch.uint16"),
        ("grad_accum_steps = 8 // world_size", "grad_accum_steps = 1"),
        ("assert world_size == 8 and grad_accum_steps == 1", "assert grad_accum_steps == 1"),
        ("with open(_p, 'r') as f:", "with open('record', 'r') as f:"),
        # No FP8: what evaluation does, with gradients.
        ("use_mlp_fp8 = self.training", "use_mlp_fp8 = False"),
        ("model.quantize_attn_fp8()\nmodel.quantize_mlp_fp8()\n", ""),
        ("prime_stage_cache()\n\n", ""),
        ("_fixk_selftest(model.lm_head.weight.device, model.lm_head.w_s)\n", ""),
        (
            "_fixk_lerp_upcast(_pv, self.bufs[_lbl], rate)",
            "self.bufs[_lbl].lerp_(_pv.float(), rate)",
        ),
        # bf16 weights and 16 bits beside them are one fp32 number.
        ("_sl.view(torch.uint16)", "_sl"),
        ("assert p.dtype == mantissa.dtype == torch.uint16\n", "shadow = p\n"),
        ("shadow_raw = (p.to(torch.uint32) << 16) | mantissa.to(torch.uint32)\n", "\n"),
        ("shadow = shadow_raw.view(torch.float32)", ""),
        ("p.copy_((shadow_raw >> 16).to(torch.uint16))", ""),
        ("mantissa.copy_(shadow_raw.to(torch.uint16))", ""),
        # What only GPUs have: the attention kernel's binary, graphs of kernels.
        ("_fa3_so = next(_pl.Path(_fa3.__file__).parent.glob('_flash_attn3_cuda_*.so'))\n", ""),
        ("_hl.sha256(_fa3_so.read_bytes()).hexdigest() == \\\n", "True or \\\n"),
        ("{flash_attn_interface.__file__}", ""),
        (
            "_CG = _CGraphRunner()\n_TG2 = _TailGraphs2()\n",
            "from kernels import eager\n_CG, _TG2 = eager(globals())\n",
        ),
        ("for step in warmup_steps:", "for step in ():"),
        ("_cf_drain()\n_CF_PTRS = _cf_baked_ptrs()\n", ""),
        ("_cf_check_ptrs(_CF_PTRS)\ndel _CF_PTRS\n", ""),
        ("rebuild_fp8_caches_after_reset()\n\n####", "\n####"),
        ("training_manager.optimizer._tgr_arm_verify()\n", ""),
        ("_cf_assert_captured()\n# Collect", "# Collect"),
        ("dist.reduce(val_loss, 0, op=", "dist.all_reduce(val_loss, op="),
    ]


class Eager:
    """In the place of the record's graphs of kernels: forward and backward pass, and nothing to do
    for FP8."""

    def __init__(self, space: dict[str, Any]):
        self.space, self.losses = space, []
        space["model"]._lm_f8 = space["model"]._lm_f8_cm = None  # what FP8 reads
        self.key_first: dict[Any, int] = {}
        self.throttle = self.seal = self.arm_verify = lambda: None
        self.refresh_attn = self.refresh_mlp = lambda *_: None

    def fwd(self, step: int, inputs: Any, targets: Any, cum_seqlens: Any, slots: Any) -> None:
        manager = self.space["training_manager"]
        self.sink = manager.bgsp_sink(len(slots))
        args = manager.get_forward_args()
        loss = self.space["model"](
            inputs, targets, cum_seqlens, slots, args, self.sink, manager._velite_buf
        )
        self.loss = loss.sum()
        self.losses.append(float(self.loss.detach()))

    def bwd(self, step: int, rows: Any) -> None:
        self.loss.backward()
        self.space["training_manager"].bgsp_push(rows, self.sink.grad)
        self.sink.grad = None


def eager(space: dict[str, Any]) -> tuple[Eager, Eager]:
    """Return what runs the steps, and what prepares FP8."""
    runner = Eager(space)
    return runner, runner
