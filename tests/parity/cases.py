"""Parity cases: records 21, 29 and track 3's baseline, shrunk like our recipe: same layers,
windows, groups."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jspeed.recipe import Recipe

from ..recipes.golden import BLOCK, COMMON, SMALL, small
from .original import Original, Replacement, replaced, text_of, torch
from .synthetic import documents, write_shards

WIDTH, HEADS, BOS, VOCAB = (COMMON[name] for name in ("WIDTH", "HEADS", "BOS", "VOCAB"))
LONGEST = SMALL["r29"]["MAX_DOC_LEN"]
LANE, EVAL, ROW = SMALL["r21"]["LANE_LEN"], SMALL["r21"]["EVAL_LEN"], SMALL["track3"]["LANE_LEN"]


@dataclass(frozen=True)
class Case:
    """A record's script and our recipe at one small size.

    ``path`` lies in the clone. ``smaller`` makes the script as small as
    :func:`tests.recipes.golden.small` makes the recipe; ``shorter`` and ``shorter_fields`` are for
    a whole run. ``arrange`` is what :class:`tests.parity.ours.Names` takes. ``setting(n)`` is what
    the script's model is given in stage n beside tokens, ``last`` the n of validation. ``lanes`` a
    rank has. ``summed``: the script's loss is the sum over a rank's tokens, not the mean.
    ``windows`` are steps around every border of a schedule. ``validate`` makes the validation
    loader; ``pack`` makes of a rank's tokens ``[lanes, T + 1]`` what its model is given;
    ``at_step`` brings schedules that count to a step. Gradients down to 10 to the power
    ``smallest`` are fed to the optimizers, whose updates agree to ``rates``. ``rest`` is the value
    of those parameters that we have not. ``attention`` takes the place of ours.
    """

    recipe_name: str
    path: str
    smaller: list[Replacement]
    shorter: list[Replacement]
    shorter_fields: dict[str, Any]
    arrange: Callable[[Callable[[str], np.ndarray]], dict[str, Any]]
    setting: Callable[[int], tuple[Any, ...]]
    last: int
    lanes: int
    summed: bool
    windows: tuple[range, ...]
    validate: Callable[[dict[str, Any]], Any]
    pack: Callable[[np.ndarray], tuple[Any, ...]]
    smallest: int = -9
    rates: float = 1e-5
    at_step: Callable[[dict[str, Any], int], None] = lambda namespace, step: None
    rest: float = 0.0
    formulas: dict[str, Any] = field(default_factory=dict)
    attention: Callable[..., jax.Array] | None = None

    def recipe(self, short: bool = False, **more: Any) -> Recipe:
        """Our recipe, of a whole run where ``short``."""
        recipe = small(self.recipe_name, **(self.shorter_fields if short else {}), **more)
        if self.attention:
            recipe.loss.__globals__["attention"] = self.attention
        return recipe

    def original(self, clone: str, folder: Path, short: bool = False, **more: Any) -> Original:
        """The script, executed up to its loop over steps, reading what :func:`write_tokens` left in
        ``folder``."""
        text = replaced(text_of(clone, self.path), self.smaller)
        return Original(
            text, self.shorter if short else (), folder=folder, formulas=self.formulas, **more
        )

    def write_tokens(self, folder: Path) -> None:
        """Write two training shards, whose border comes early, and one validation shard."""
        rng, recipe = np.random.default_rng(0), self.recipe()
        batch = recipe.tokens_per_step(recipe.stages[0])
        longest = 2 * LONGEST if recipe.data.align else recipe.stages[0].lane_len // 2
        write_shards(
            folder, "train", [documents(rng, BOS, int(n * batch), longest) for n in (5.4, 40)]
        )
        write_shards(folder, "val", [documents(rng, BOS, recipe.eval_tokens + 500, longest)])


def rows_to(size: int, table: np.ndarray) -> np.ndarray:
    """Add rows that the record has not (-1), up to ``size``."""
    return np.concatenate([table, np.full((size - len(table), *table.shape[1:]), -1)])


def _r21_arrange(of: Callable[[str], np.ndarray]) -> dict[str, Any]:
    attention, mlp = [], []
    for layer in range(12):
        if layer != 7:
            attention += [
                *of(f"blocks.{layer}.attn.qkv_w").mT,
                of(f"blocks.{layer}.attn.c_proj.weight").T,
            ]
        mlp += [of(f"blocks.{layer}.mlp.c_fc.weight").T, of(f"blocks.{layer}.mlp.c_proj.weight")]
    unused = np.full(2, -1)
    return dict(
        embed=rows_to(VOCAB, of("embed.weight")),
        values=np.stack([rows_to(VOCAB, of(f"value_embeds.embed.{n}.weight")) for n in range(3)]),
        block_scales=np.stack([of(f"blocks.{layer}.lambdas") for layer in range(12)]),
        value_scales=np.stack(
            [unused if n == 7 else of(f"blocks.{n}.attn.lambdas") for n in range(12)]
        ),
        skip_scales=of("skip_weights"),
        attention=np.pad(attention, [(0, 4), (0, 0), (0, 0)], constant_values=-1),
        mlp=np.stack(mlp),
        head=of("lm_head.weight"),
    )


def _by_blocks(
    q: jax.Array, k: jax.Array, v: jax.Array, *, scale: float, documents: Any, window: Any, **_: Any
) -> Any:
    """Attention by record 21's own rule, which our window of tokens is the nearest to: query and
    key less than n blocks apart; n is that of a window of ``BLOCK n - BLOCK / 2 + 1`` tokens."""
    blocks = (window + BLOCK // 2 - 1) // BLOCK
    t = jnp.arange(q.shape[1])
    seen = (t[:, None] >= t[None]) & (t[:, None] // BLOCK - t[None] // BLOCK < blocks)
    seen = seen[None] & (documents.ids[:, :, None] == documents.ids[:, None])
    scores = jnp.where(seen[:, None], jnp.einsum("bthk,bshk->bhts", q, k) * scale, -jnp.inf)
    return jnp.einsum("bhts,bshk->bthk", jax.nn.softmax(scores, axis=-1), v)


def _pack(tokens: np.ndarray) -> tuple[Any, ...]:
    row = torch.from_numpy(tokens[0].astype(np.int64))
    return row[:-1].int(), row[1:]


def _r21_setting(number: int) -> tuple[Any, ...]:
    return (torch.tensor(number + 1, dtype=torch.int32),)


def _r21_at_step(namespace: dict[str, Any], step: int) -> None:
    for scheduler in namespace["schedulers"]:
        scheduler.last_epoch = step - 1
        scheduler.step()


def _r21_validate(namespace: dict[str, Any]) -> Any:
    args = namespace["args"]
    world, rank = namespace["world_size"], namespace["rank"]
    return namespace["distributed_data_generator"](
        args.val_files, world * args.val_seq_len, rank, world
    )


R21 = Case(
    recipe_name="r21",
    path="records/track_1_short/2025-01-26_BatchSize/c44090cc-1b99-4c95-8624-38fb4b5834f9.txt",
    smaller=[
        ("head_dim=128", f"head_dim={WIDTH // HEADS}"),
        ("vocab_size=50257", f"vocab_size={BOS + 1}"),
        ("model_dim=768", f"model_dim={WIDTH}"),
        ("input_seq == 50256", f"input_seq == {BOS}"),
        ("BLOCK_SIZE = 128", f"BLOCK_SIZE = {BLOCK}"),
        ("    seq_len = 48*1024", f"    seq_len = {LANE}"),
        ("val_seq_len = 4*64*1024", f"val_seq_len = {EVAL}"),
        ("val_tokens = 10485760", f"val_tokens = {8 * EVAL}"),
        (
            "(1728 * step / train_steps, n=128)",
            f"({1728 * BLOCK // 128} * step / train_steps, n={BLOCK})",
        ),
        ("window_size // 128", f"window_size // {BLOCK}"),
        ("val_loss_every = 125", "val_loss_every = 0"),
    ],
    shorter=[
        ("num_iterations = 1770", "num_iterations = 10"),
        (f"({1728 * BLOCK // 128} * step", f"({3 * BLOCK} * step"),
        ("step / 300", "step / 4"),
    ],
    shorter_fields={"STEPS": 10, "WINDOW": 3 * BLOCK, "MOMENTUM_WARMUP": 4},
    arrange=_r21_arrange,
    setting=_r21_setting,
    last=13,
    lanes=1,
    summed=False,
    windows=(range(0, 3), range(298, 302), range(1061, 1065), range(1767, 1770)),
    validate=_r21_validate,
    pack=_pack,
    at_step=_r21_at_step,
    attention=_by_blocks,
)


def _r29_arrange(of: Callable[[str], np.ndarray]) -> dict[str, Any]:
    attention, mlp = [], []
    for layer in range(12):
        if layer != 7:
            attention += [*of(f"blocks.{layer}.attn.qkvo_w").mT]
        mlp += [of(f"blocks.{layer}.mlp.c_fc"), of(f"blocks.{layer}.mlp.c_proj")]
    gates = [
        of(f"blocks.{n}.attn.attn_gate.weight").T if n != 7 else np.full((12, HEADS), -1)
        for n in range(12)
    ]
    scalars = of("scalars")
    value_scales = scalars[36:60].reshape(12, 2).copy()
    return {
        "embed": of("embed.weight"),
        "values": np.stack([of(f"value_embeds.{n}.weight") for n in range(3)]),
        "block_scales": scalars[12:36].reshape(12, 2),
        "value_scales": value_scales,
        "skip_scales": scalars[:6],
        "attention": np.pad(attention, [(0, 4), (0, 0), (0, 0)], constant_values=-1),
        "mlp": np.stack(mlp),
        "gate": np.stack(gates),
        "head": of("lm_head.weight"),
    }


def _symmetric(a: Any, out: Any) -> Any:
    return out.copy_(a @ a.mT)


def _symmetric_and_self(a: Any, alpha: float, beta: float, out: Any) -> Any:
    return out.copy_(alpha * (a @ a.mT) + beta * a)


def _r29_pack(tokens: np.ndarray) -> tuple[Any, ...]:
    inputs, targets = _pack(tokens)
    starts = torch.nonzero(inputs == BOS)[:, 0]
    ends = torch.tensor([len(inputs)])
    return inputs, targets, torch.cat([torch.zeros(1, dtype=starts.dtype), starts, ends]).int()


def _r29_validate(namespace: dict[str, Any]) -> Any:
    args = namespace["args"]
    return namespace["distributed_data_generator"](
        args.val_files, args.val_batch_size, -1, align_to_bos=False
    )


R29 = Case(
    recipe_name="r29",
    path="records/track_1_short/2025-09-03_FA3/44fc1276-0510-4961-92c0-730c65e5feba.txt",
    smaller=[
        ("head_dim=128", f"head_dim={WIDTH // HEADS}"),
        ("vocab_size=50257", f"vocab_size={BOS + 1}"),
        ("model_dim=768", f"model_dim={WIDTH}"),
        ("BOS_ID = 50256", f"BOS_ID = {BOS}"),
        ("block_size: int = 128", f"block_size: int = {BLOCK}"),
        ("train_batch_size: int = 2048 * 24 * 8", f"train_batch_size: int = {8 * LANE}"),
        ("train_max_seq_len: int = 128 * 16", f"train_max_seq_len: int = {LONGEST}"),
        ("val_batch_size: int = 4 * 64 * 1024 * 8", f"val_batch_size: int = {8 * EVAL}"),
        ("val_tokens: int = 10485760", f"val_tokens: int = {8 * EVAL}"),
        ("val_loss_every: int = 125", "val_loss_every: int = 0"),
        ("warmup_steps = 30", "warmup_steps = 0"),
    ],
    shorter=[
        ("num_iterations: int = 1670", "num_iterations: int = 11"),
        ("step / 300", "step / 4"),
    ],
    shorter_fields={"STEPS": 11, "MOMENTUM_WARMUP": 4},
    arrange=_r29_arrange,
    setting=lambda number: ((3, 7, 11)[number],),
    last=2,
    lanes=1,
    summed=True,
    windows=(range(0, 3), range(298, 302), range(917, 921), range(1667, 1670)),
    validate=_r29_validate,
    pack=_r29_pack,
    smallest=-4,  # the record adds epsilon before Adam's bias correction, optax after it
    rest=1.0,
    formulas={"ns_line_1": _symmetric, "ns_line_2": _symmetric_and_self},
)


def _track3_arrange(of: Callable[[str], np.ndarray]) -> dict[str, Any]:
    attention, biases, mlp = [], [], []
    for layer in range(12):
        name = f"blocks.{layer}.attn"
        attention += [of(f"{name}.{part}.weight").T for part in "qkv"] + [of(f"{name}.proj.weight")]
        biases += [of(f"{name}.{part}.bias") for part in ("q", "k", "v", "proj")]
        mlp += [of(f"blocks.{layer}.mlp.fc.weight").T, of(f"blocks.{layer}.mlp.proj.weight")]

    def every(name: str) -> np.ndarray:
        return np.stack([of(f"blocks.{layer}.{name}") for layer in range(12)])

    return {
        "embed": of("embed.weight"),
        "embed_gain": of("norm1.gains"),
        "attention_gain": every("norm1.gains"),
        "attention": np.stack(attention),
        "attention_bias": np.stack(biases),
        "mlp_gain": every("norm2.gains"),
        "mlp": np.stack(mlp),
        "up_bias": every("mlp.fc.bias"),
        "down_bias": every("mlp.proj.bias"),
        "final_gain": of("norm2.gains"),
        "head": of("proj.weight"),
        "head_bias": of("proj.bias"),
    }


def _track3_pack(tokens: np.ndarray) -> tuple[Any, ...]:
    rows = torch.from_numpy(tokens.astype(np.int64))
    return rows[:, :-1].int(), rows[:, 1:].contiguous()


def _track3_validate(namespace: dict[str, Any]) -> Any:
    return iter([(namespace["val_inputs"], namespace["val_targets"])])


TRACK3 = Case(
    recipe_name="track3",
    path="records/track_3_optimization/results/20260610_tuned_baseline_3250/"
    "263ea3c4-2b13-4adf-8a71-0410386b20e1.txt",
    smaller=[
        ("head_dim=128", f"head_dim={WIDTH // HEADS}"),
        ("vocab_size=50304", f"vocab_size={VOCAB}"),
        ("model_dim=768", f"model_dim={WIDTH}"),
        ("seq_len=1024", f"seq_len={ROW}"),
        ("val_tokens = 20 * 524288", f"val_tokens = {32 * ROW}"),
        ("batch_size = 8 * 64 * 1024", f"batch_size = {32 * ROW}"),
        ("mbs = 64", "mbs = 4"),
        ("if step == train_steps or step % val_step_freq == 0", "if step == train_steps"),
        ("model.compile(dynamic=False)", "pass"),
    ],
    shorter=[("train_steps = 3250", "train_steps = 10")],
    shorter_fields={"STEPS": 10},
    arrange=_track3_arrange,
    setting=lambda number: (),
    last=0,
    lanes=4,
    summed=True,
    windows=(range(0, 3), range(974, 978), range(3247, 3250)),
    validate=_track3_validate,
    pack=_track3_pack,
    rates=1e-4,  # they fall to 0: the last ones, 1 - (step / steps) in fp32, have five digits
)

CASES = {case.recipe_name: case for case in (R21, R29, TRACK3)}
