"""Build record 92's script and our recipe with equal parameters and data."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import count, pairwise
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from jspeed.recipe import Recipe, leaves
from jspeed.run.find_recipe import find
from jspeed.speedrun.candidates import candidates

from ..recipes.r62_r89_golden import filled
from . import r62_r89_formulas
from . import r62_r89_runs as runs
from .original import Rank
from .ours import Named, Names, Tree, batches
from .r62_r89_names import channels, to
from .r62_r89_pair import without_maxima
from .r92_script import WORLD, Size, script

Lane = tuple[Any, ...]

NGRAMS = "bigram_embed.weight"  # each process has its part


class Pair:
    """The record's script (``script``), our recipe (``recipe``) and which of our elements are which
    of its.

    ``own_losses``: of each process, of each token's own target, an array for every lane that its
    model has trained on.
    """

    def __init__(self, texts: Mapping[str, str], folder: Path, size: Size):
        self.size, self.folder = size, folder
        self.script, self.own_losses = script(texts, folder, size)
        self.recipe: Recipe = find("r92", size.sets(), trace=False).recipe
        shapes = self.script.shapes() | {NGRAMS: (size.ngrams, size.width)}
        self.names = Names(shapes, lambda of: _arranged(of, self.recipe, size))
        self.compiled = runs.Ours(self.recipe)
        self.ngrams = np.zeros((size.ngrams, size.width), np.float32)
        runs.give_signs(self.script, size.width)
        self.script.each(self._give_candidates)

    def _give_candidates(self, rank: Rank) -> None:
        """Record 92 goes on with negatives where its search has ended; let them be ours."""
        manager, vocab = rank.namespace["training_manager"], self.size.vocab
        stage, now = manager.sns_stage, [0]

        def sns_stage(step: int, targets: np.ndarray) -> Any:
            now[0] = step
            return stage(step, targets)

        def negatives(need: int, mark: np.ndarray, _: int) -> np.ndarray:
            count, targets = int(need + mark[:vocab].sum()), np.flatnonzero(mark[:vocab])
            start = rank.number * vocab // WORLD + now[0] * count
            return np.setdiff1d(
                np.asarray(candidates(jnp.asarray(targets), vocab, count, start)[0]), targets
            )

        manager.sns_stage, manager._sns_negatives = sns_stage, negatives

    def start(self, apart: bool = False) -> Tree:
        """Give both the same parameters; return them. ``apart``: embedding is not head."""
        params = filled(self.recipe)
        params["mudd_groups"] = params["mudd_groups"] / 6
        if apart:
            params["embed"] = filled(self.recipe, 1)["embed"]
        self.load(params)
        return params

    def load(self, params: Tree) -> None:
        """Give the record these parameters, to each process its part of the n-grams."""
        values = self.names.theirs(params)
        self.ngrams = values[NGRAMS]
        parts = np.split(self.ngrams, WORLD)
        self.script.load(lambda rank: values | {NGRAMS: parts[rank]})

    def mine(self, theirs: Named) -> Tree:
        """Parameters or gradients of the record as ours, without what is none of its."""
        return without_maxima(self.names.ours(theirs))

    def parameters(self) -> Tree:
        """The record's parameters as ours."""
        named = [self.script.parameters(rank=rank) for rank in range(WORLD)]
        return self.mine(named[0] | {NGRAMS: np.concatenate([part[NGRAMS] for part in named])})

    def cut(self, stage: int | None) -> list[Lane]:
        """A lane of each process from the record's generator: of training or validation."""

        def take(rank: Rank) -> Lane:
            args, make = rank.namespace["args"], rank.namespace["distributed_data_generator"]
            if stage is None:
                lanes = make(args.val_files, args.val_batch_size, -1, align_to_bos=False)
            else:
                of = self.recipe.stages[stage]
                lanes = make(args.train_files, WORLD * of.lane_len, of.max_doc_len)
            return tuple(part.clone() for part in next(lanes)[:4])

        return self.script.each(take)

    def trained(self, step: int, lanes: Sequence[Lane]) -> tuple[np.ndarray, float, Tree]:
        """Of a training step before its update: (each token's loss, the mean over processes of what
        is descended on, our gradients)."""

        def run(rank: Rank) -> tuple[np.ndarray, float, Named]:
            import torch

            manager, model = runs.at_step(rank, self.recipe, step), rank.namespace["model"]
            inputs, targets, documents, rows = lanes[rank.number]
            manager.sns_upload(manager.sns_stage(step, targets.numpy()))
            model.bg_cache.copy_(torch.from_numpy(self.ngrams))
            sink, values = (
                torch.zeros(len(rows), self.size.width, requires_grad=True),
                manager._velite_buf.zero_(),
            )
            model.train()
            model.zero_grad(set_to_none=True)
            self.own_losses[rank.number].clear()
            total = model(
                inputs, targets, documents, rows, manager.get_forward_args(), sink, values
            ).sum()
            total.backward()
            grads = self.script.gradients(rank=rank.number)
            grads |= {NGRAMS: np.zeros_like(self.ngrams), "value_embeds": values.numpy().copy()}
            np.add.at(grads[NGRAMS], rows.numpy(), sink.grad.numpy())
            return self.own_losses[rank.number][0], float(total.detach()), grads

        losses, totals, grads = zip(*self.script.each(run, list(range(len(lanes)))), strict=True)
        mean = {name: np.mean([named[name] for named in grads], axis=0) for name in grads[0]}
        return np.stack(losses), float(np.mean(totals)), self.mine(mean)

    def evaluated(self, lanes: Sequence[Lane]) -> np.ndarray:
        """Each token's loss in the record's last validation."""

        def run(rank: Rank) -> np.ndarray:
            import torch

            manager, model = (
                runs.at_step(rank, self.recipe, self.recipe.steps),
                rank.namespace["model"],
            )
            manager.apply_final_ws_ext()
            for angles in (model.yarn, model.yarn_paired_head, model.yarn_wide):
                angles.r2_ensure_full()
            model.bg_cache.copy_(torch.from_numpy(self.ngrams))
            model.eval()
            rank.losses.clear()
            with torch.no_grad():
                model(*lanes[rank.number], manager.get_forward_args())
            model.train()
            return rank.losses.pop()

        return np.stack(self.script.each(run))

    @contextmanager
    def wider_window(self, number: int) -> Iterator[None]:
        """Let the ``number``-th attention of a forward pass see one key more."""
        plain = r62_r89_formulas.attention

        def widen(rank: Rank) -> None:
            calls = count()

            def attention(*args: Any, window_size: Any, **rest: Any) -> Any:
                return plain(
                    *args, window_size=(window_size[0] + (next(calls) == number), 0), **rest
                )

            rank.namespace["flash_attn_interface"].flash_attn_varlen_func = attention

        def restore(rank: Rank) -> None:
            rank.namespace["flash_attn_interface"].flash_attn_varlen_func = plain

        self.script.each(widen)
        try:
            yield
        finally:
            self.script.each(restore)

    def give_prefixes(self, prefixes: np.ndarray) -> None:
        """Let these be the prefixes of the record's tokens."""

        def give(rank: Rank) -> None:
            import torch

            rank.namespace["_PTP_TAB_NP"] = prefixes.astype(np.int64)
            rank.namespace["_ptp_tab_cache"].copy_(torch.from_numpy(prefixes))

        self.script.each(give)

    def lane(self, tokens: np.ndarray) -> Lane:
        """A lane of given tokens ``[T + 1]``, which start with a document, as the record's
        generator makes it."""

        def make(rank: Rank) -> Lane:
            import torch

            starts = [*np.flatnonzero(tokens[:-1] == self.size.bos), len(tokens) - 1]
            borders = [n for a, b in pairwise(starts) for n in range(a, b, self.size.segment)]
            ends = torch.tensor(
                [*borders, *[len(tokens) - 1] * (64 - len(borders))], dtype=torch.int32
            )
            row = torch.from_numpy(np.ascontiguousarray(tokens, np.int32))
            return (
                row[:-1],
                row[1:].long(),
                ends,
                rank.namespace["get_sgsame_hash"](row[:-1]).clone(),
            )

        return self.script.each(make, [0])[0]

    def batches(self, split: str, count: int) -> list[np.ndarray]:
        """Our batches of the shards."""
        return batches(self.recipe, self.folder, split, count)


def _arranged(of: Callable[[str], np.ndarray], recipe: Recipe, size: Size) -> Tree:
    """Where our elements lie in the record's parameters."""
    rows = {name: sum(spec.shape[:1]) for name, spec in leaves(recipe.parameters)}
    scalars, order = of("scalars"), channels(2 * size.head, size.head)
    fed = [*range(7), 8, 9, 10, 11]  # layer 7 has no MLP, layer 8's second one is the last
    return {
        "embed": of("embed.weight"),
        "head": of("lm_head.weight").T,
        "values": of("value_embeds").reshape(4, size.vocab, size.width).swapaxes(0, 1),
        "ngrams": of(NGRAMS),
        "queries_keys": to(rows["queries_keys"], of("qk_bank")[:42, order].mT),
        "values_outs": to(rows["values_outs"], of("vo_bank")[:14].mT),
        "mlp": to(rows["mlp"], of("mlp_bank")[fed].reshape(22, size.mlp, size.width).mT),
        "value_gates": of("ve_gate_bank")[:3].mT,
        "smear_gate": of("smear_gate.weight"),
        "attention_scales": scalars[:22].reshape(11, 2),
        "smear_scale": scalars[22],
        "skip_scale": scalars[23],
        "layer_scales": of("resid_lambdas"),
        "post_scales": of("post_lambdas"),
        "mudd_up": of("mudd_w1").mT,
        "mudd_down": of("mudd_w2").mT,
        "mudd_groups": of("mudd_w2g")[:10].transpose(2, 0, 1),
        "mudd_bias": of("mudd_b2"),
        "gates_up": of("mudd_gate_w1").mT,
        "gates_down": in_kinds(of("mudd_gate_w2")).mT,
        "gates_bias": in_kinds(of("mudd_gate_b2")),
        "gates_scale": of("_mudd_gate_scale"),
        "largest": np.full((11, 5), -1),
    }


def in_kinds(table: np.ndarray) -> np.ndarray:
    """The gates of both sets kind by kind, as ours lie, and -1 for what only the other set has: the
    record's have some that nothing reads, and go layer by layer where the start and n-grams enter.
    """
    early = [*range(18), 18, 20, 22, 19, 21]
    late = [*range(12, 18), 28, 18, 20, 22, 19, 21, 27]
    rest = np.full((len(early) - len(late), *table.shape[2:]), -1)
    return np.stack([table[0, early], np.concatenate([table[1, late], rest])])
