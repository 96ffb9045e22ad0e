"""Records 62 and 89 on a CPU: their scripts at a small size, kernels and bf16 replaced."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ..recipes.r62_r89_golden import Size
from . import r62_r89_formulas
from .original import Original, Replacement, text_of

OPENED = "with open(os.path.join(os.path.dirname(sys.argv[0]), '{}'), 'r')"
R89 = "train_gpt.py", "f411b3d3"  # newer commits have other records there
R62 = (
    "records/track_1_short/2026-01-19_BigramHashEmbedding/40ec7bb6-14b3-46f8-90b7-bb5ed188faba.txt"
)


def script(
    name: str,
    clone: str,
    folder: Path,
    size: Size,
    *,
    past_end: bool = False,
    fp8: list[Any] | None = None,
    world: int = 1,
    bos: int | None = None,
) -> tuple[Original, list[np.ndarray]]:
    """Execute a record's script up to its training loop: (the script, losses of its training as
    they are formed).

    ``past_end`` and ``fp8`` as :func:`r62_r89_formulas.kernels` takes them; ``bos`` where it is not
    of ``size``.
    """
    text = (text_of(clone, R62) if name == "r62" else text_of(clone, *R89)).split(
        "-" * 40 + "\n# triton_kernels.py"
    )[0]
    found: list[np.ndarray] = []
    bos = size.bos if bos is None else bos
    changes = [*_both(name, size, bos), *(_of_62(size) if name == "r62" else _of_89(size, bos))]
    kernels = r62_r89_formulas.kernels(found, past_end, fp8)
    # The scripts ask for DISABLE_FP8.
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DISABLE_FP8", "1" if fp8 is None else "")
        made = Original(text, changes, folder=folder, world=world, modules=kernels)
    return made, found


def _both(name: str, size: Size, bos: int) -> list[Replacement]:
    newer = name == "r89"
    return [
        (OPENED.format("triton_kernels.py"), "with open('record', 'r')"),
        ("{triton.__version__}", ""),
        ("pin_memory=True", "pin_memory=False", 3 if newer else 1),
        # Compiled, this reads before it writes; eager, it would read what it has just written.
        ("k[:, :-1, :, self.head_dim // 2:]", "k[:, :-1, :, self.head_dim // 2:].clone()"),
        # bf16 weights and 16 bits beside them are one fp32 number.
        ("assert p.dtype == mantissa.dtype == torch.uint16", "p_precise = p"),
        ("p_precise_raw = (p.to(torch.uint32) << 16) | mantissa.to(torch.uint32)", ""),
        ("p_precise = p_precise_raw.view(torch.float32)", ""),
        ("p.copy_((p_precise_raw >> 16).to(torch.uint16))", ""),
        ("mantissa.copy_(p_precise_raw.to(torch.uint16))", ""),
        (".view(torch.uint16)", "", 2),
        ("BOS_ID = 50256", f"BOS_ID = {bos}"),
        ("muon_warmup_steps=300, ", f"muon_warmup_steps={size.warmup}, "),
        ("muon_cooldown_steps=50", f"muon_cooldown_steps={size.end}"),
        ("for step in warmup_steps:", "for step in ():"),
        ("vocab_size=50257,", f"vocab_size={size.vocab},"),
        ("head_dim=128,", f"head_dim={size.head},"),
        ("model_dim=768,", f"model_dim={size.width},"),
        ("dist.reduce(val_loss, 0, op=", "dist.all_reduce(val_loss, op="),
        ("val_loss_every: int = 250", "val_loss_every: int = 0"),
        ("val_tokens: int = 10485760", f"val_tokens: int = {8 * size.eval_len}"),
        ("val_batch_size: int = 4 * 64 * 1024 * 8", f"val_batch_size: int = {8 * size.eval_len}"),
    ]


def _of_62(size: Size) -> list[Replacement]:
    batches = tuple(8 * length for length in size.lanes)
    return [
        ("block_size: int = 128", f"block_size: int = {size.block}"),
        ("num_scheduled_iterations: int = 1560", f"num_scheduled_iterations: int = {size.steps}"),
        ("num_extension_iterations: int = 40", f"num_extension_iterations: int = {size.extra}"),
        ("(8 * 2048 * 8, 16 * 2048 * 8, 24 * 2048 * 8)", str(batches[:3])),
        ("train_bs_extension: int = 24 * 2048 * 8", f"train_bs_extension: int = {batches[3]}"),
        ("train_max_seq_len: int = 128 * 16", f"train_max_seq_len: int = {size.documents[1]}"),
        ("bigram_vocab_size = 50304 * 5", f"bigram_vocab_size = {size.bigrams}"),
    ]


def _of_89(size: Size, bos: int) -> list[Replacement]:
    batches = tuple(8 * length for length in size.lanes)
    table = {length: 64 for length in (*size.lanes, size.eval_len)}
    return [
        (OPENED.format("dc_triton_kernels.py"), "with open('record', 'r')"),
        (
            "torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count",
            "1",
        ),
        ("window=112", f"window={size.composed}"),
        ("self.block_size = 128", f"self.block_size = {size.block}"),
        ("num_scheduled_iterations: int = 1270", f"num_scheduled_iterations: int = {size.steps}"),
        ("num_extension_iterations: int = 15", f"num_extension_iterations: int = {size.extra}"),
        (" batch_size=8 * 2048 * 8", f" batch_size={batches[0]}"),
        (" batch_size=16 * 2048 * 8", f" batch_size={batches[1]}"),
        (" batch_size=24 * 2048 * 8", f" batch_size={batches[2]}", 2),
        ("train_max_seq_len=896", f"train_max_seq_len={size.documents[0]}"),
        ("train_max_seq_len=2048", f"train_max_seq_len={size.documents[1]}", 3),
        ("bigram_vocab_size: int = 50304 * 15 // 2", f"bigram_vocab_size: int = {size.bigrams}"),
        ("bigram_dim: int = 768", f"bigram_dim: int = {size.width}"),
        # A smaller vocabulary has the first of GPT-2's byte pairs.
        (
            "sorted(byte_to_id.items())",
            f"sorted((b, tid) for b, tid in byte_to_id.items() if tid < min(vocab_size, {bos}))",
        ),
        (
            "TRAIN_MAX_NUM_DOCS = {16384: 64, 32768: 96, 49152: 128}",
            f"TRAIN_MAX_NUM_DOCS = {table}",
        ),
    ]
