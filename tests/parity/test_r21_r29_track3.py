"""Recipes r21, r29 and track3 against their records' own source: losses, gradients, updates, whole
steps, data."""

import dataclasses
from contextlib import nullcontext
from itertools import islice, repeat

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspeed.data import TokenLoader, find_split
from jspeed.model import fp8
from jspeed.recipe import Context

from ..recipes.golden import STEPS, draw_tokens, fill, small, summary
from ..recipes.test_golden import paste, same
from .cases import CASES
from .conftest import check
from .original import torch
from .ours import Forward, Names, eval_context, train, updates

each_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


@pytest.fixture(scope="session")
def folders(tmp_path_factory):
    """Where the shards of each case lie."""
    found = {name: tmp_path_factory.mktemp(name) for name in CASES}
    for name, folder in found.items():
        CASES[name].write_tokens(folder)
    return found


@pytest.fixture
def original(case, clone, folders):
    return case.original(clone, folders[case.recipe_name])


@pytest.fixture
def names(case, original):
    return Names(original.shapes(), case.arrange)


def started(case, original, names):
    """Parameters of ours, zero where the record has none, which the record's model has too."""
    given = names.theirs(fill(case.recipe()), case.rest)
    original.load(given)
    return names.ours(given)


def batches(case, original, count, training=True):
    """The next batches of every rank as the script reads them, and their tokens ``[lanes, lane_len
    + 1]``."""

    def read(rank):
        space = rank.namespace
        loader = space["train_loader"] if training else case.validate(space)
        return list(islice(loader, count))

    ranks = original.each(read)
    tokens = []
    for number in range(count):
        lanes = []
        for batch in ranks:
            inputs, targets = (a.numpy().reshape(case.lanes, -1) for a in batch[number][:2])
            assert (inputs[:, 1:] == targets[:, :-1]).all()
            lanes.append(np.concatenate([inputs, targets[:, -1:]], axis=1))
        tokens.append(np.concatenate(lanes))
    return ranks, tokens


def forward(case, original, batches, setting, training=True):
    """Losses of the tokens of the first ranks' batches; the gradients are left in their models."""

    def call(rank):
        model, batch = rank.model().train(training), batches[rank.number]
        model.zero_grad(set_to_none=True)
        with torch.set_grad_enabled(training):
            loss = model(*batch, *case.setting(setting))
        if training:
            loss.backward()
        return rank.losses.pop().reshape(case.lanes, -1)

    return np.concatenate(original.each(call, range(len(batches))))


def mean_gradients(case, original, names, losses_BT):
    """Gradients of the mean of these losses, by our names."""
    found = [original.gradients(rank=rank) for rank in range(len(losses_BT) // case.lanes)]
    tokens = losses_BT.size if case.summed else len(found)
    return names.ours({name: sum(g[name] for g in found) / tokens for name in found[0]})


@each_case
def test_losses_in_every_stage_and_in_evaluation(case, original, names, agree):
    recipe, params = case.recipe(), started(case, original, names)
    ours = Forward(recipe, alike=case.attention is not None)
    given, (tokens,) = batches(case, original, 1)
    for number, stage in enumerate(recipe.stages):
        expected = forward(case, original, [lane for (lane,) in given[:2]], number)
        found = ours.losses(Context(stage, training=True), params, tokens[: len(expected)])
        agree(case.recipe_name, "forward", found, expected, 1e-6)
    given, (tokens,) = batches(case, original, 1, training=False)
    expected = forward(case, original, [lane for (lane,) in given[:2]], case.last, training=False)
    found = ours.losses(eval_context(recipe), params, tokens[: len(expected)])
    agree(case.recipe_name, "forward", found, expected, 1e-6)


@each_case
def test_gradients_in_the_first_and_last_stage(case, original, names, agree):
    recipe, params = case.recipe(), started(case, original, names)
    ours = Forward(recipe, alike=case.attention is not None)
    given, (tokens,) = batches(case, original, 1)
    for number in sorted({0, len(recipe.stages) - 1}):
        losses_BT = forward(case, original, [lane for (lane,) in given[:2]], number)
        expected = mean_gradients(case, original, names, losses_BT)
        ctx = Context(recipe.stages[number], training=True)
        found = ours.gradients(ctx, params, tokens[: len(losses_BT)])
        agree(case.recipe_name, "gradients", found, expected, 1e-5)


def gradients_to_feed(case, names, params, count, seed=0):
    """Gradients that change from step to step, some rows of tables down to where Adam's epsilon
    counts, some zero."""
    rng = np.random.default_rng(seed)

    def draw(p):
        rows = 10.0 ** rng.integers(case.smallest, 0, (*p.shape[:-1], 1)) * rng.integers(
            0, 2, (*p.shape[:-1], 1)
        )
        scale = rows if p.ndim == 2 and p.shape[0] > 100 else 1e-2
        return (rng.choice([-1, 1], p.shape) * rng.uniform(0.5, 1.5, p.shape) * scale).astype(
            np.float32
        )

    drawn = [{name: draw(p) for name, p in params.items()} for _ in range(count)]
    return [names.ours(names.theirs(tree)) for tree in drawn]


def fed(case, original, names, grads, params, steps):
    """Parameters after each of ``steps`` of the script's own loop on ``grads`` of the mean loss,
    from ``params``."""
    recipe = case.recipe()
    per_rank = recipe.lanes * recipe.stages[0].lane_len / 8 if case.summed else 1
    given = [
        {name: value * np.float32(per_rank) for name, value in names.theirs(tree).items()}
        for tree in grads
    ]
    original.load(names.theirs(params, case.rest))
    original.feed(lambda number: given[number])
    forget(case, original, steps[0])
    found = []
    for step in steps:
        original.run([step])
        found.append(names.ours(original.parameters()))
    return found


def forget(case, original, step):
    """Bring every rank to ``step``, with fresh optimizers and one batch for ever."""

    def renew(rank):
        space = rank.namespace
        batch = next(space["train_loader"])
        space["train_loader"] = repeat(batch)
        for optimizer in space["optimizers"]:
            optimizer.state.clear()
        case.at_step(space, step)

    original.each(renew)


def changes(params, after):
    """The update of each step."""
    return [{k: b[k] - a[k] for k in a} for a, b in zip([params, *after], after, strict=False)]


@each_case
def test_updates_at_every_border_of_a_schedule(case, original, names, agree):
    recipe, params = case.recipe(), started(case, original, names)
    for steps in case.windows:
        # The last updates are so small that in a parameter of full size only their first digits are
        # left.
        last = steps[-1] == recipe.steps - 1
        start = {name: p * np.float32(1e-4 if last else 1) for name, p in params.items()}
        grads = gradients_to_feed(case, names, params, len(steps), seed=steps[0])
        expected = changes(start, fed(case, original, names, grads, start, steps))
        found = changes(start, updates(recipe, start, grads, steps[0]))
        agree(case.recipe_name, "optimizer", found, expected, case.rates)


@each_case
def test_a_short_run(case, clone, folders, agree):
    folder = folders[case.recipe_name]
    original, recipe = case.original(clone, folder, short=True), case.recipe(short=True)
    names = Names(original.shapes(), case.arrange)
    params = started(case, original, names)
    original.run(range(recipe.steps + 1))
    per_rank = [
        [np.mean(call, dtype=np.float64) for call in rank.losses] for rank in original.ranks
    ]
    *expected, validation = np.mean(per_rank, axis=0)

    loader = loader_of(recipe, folder, "train")
    found, after = train(recipe, params, (batch.tokens for batch in islice(loader, recipe.steps)))
    rows = next(loader_of(recipe, folder, "val")).tokens
    found_validation = np.mean(
        Forward(recipe).losses(eval_context(recipe), after, rows), dtype=np.float64
    )
    assert max(expected) - min(expected) > 0.1
    agree(
        case.recipe_name, "whole steps", [*found, found_validation], [*expected, validation], 1e-6
    )


def loader_of(recipe, folder, split):
    """Our batches of the same shards, as a run cuts them: from start to end, in order."""
    shards = find_split(folder / "data" / "fineweb10B", split)
    common = {"bos_id": recipe.data.bos_id, "vocab_size": recipe.data.vocab_size, "prefetch": 0}
    if split == "val":
        lanes = recipe.eval_tokens // recipe.eval_len
        return TokenLoader(shards, lanes=lanes, lane_len=recipe.eval_len, **common)
    return TokenLoader(
        shards, lanes=recipe.lanes, schedule=recipe.stages, align=recipe.data.align, **common
    )


@each_case
def test_tokens(case, original, folders, agree):
    recipe = case.recipe()
    for split, count in (("train", 12), ("val", 1)):
        _, expected = batches(case, original, count, training=split == "train")
        loader = loader_of(recipe, folders[case.recipe_name], split)
        found = [np.array(batch.tokens) for batch in islice(loader, count)]
        assert len(found) == count
        agree(case.recipe_name, "data", found, expected, 0)


def test_a_wider_window_is_noticed(clone, folders):
    case = CASES["r29"]
    original, recipe = case.original(clone, folders["r29"]), case.recipe()
    names = Names(original.shapes(), case.arrange)
    params = started(case, original, names)
    given, (tokens,) = batches(case, original, 1)
    expected = forward(case, original, [lane for (lane,) in given[:2]], 0)
    stage = recipe.stages[0]
    for more, notice in (
        (0, nullcontext()),
        (1, pytest.raises(AssertionError, match="r29, forward")),
    ):
        other = Context(
            dataclasses.replace(stage, windows=tuple(n + more for n in stage.windows)),
            training=True,
        )
        with notice:
            check(
                "r29", "forward", Forward(recipe).losses(other, params, tokens[:2]), expected, 1e-6
            )


def test_twice_the_rate_of_one_group_is_noticed(clone, folders):
    case = CASES["r29"]
    original = case.original(clone, folders["r29"])
    names = Names(original.shapes(), case.arrange)
    params = started(case, original, names)
    grads = gradients_to_feed(case, names, params, 1)
    expected = changes(params, fed(case, original, names, grads, params, range(1)))
    for rate, notice in (
        (0.04, nullcontext()),
        (0.08, pytest.raises(AssertionError, match="_scales")),
    ):
        recipe = case.recipe(SCALAR_LR=rate)
        with notice:
            check(
                "r29",
                "optimizer",
                changes(params, updates(recipe, params, grads, 0)),
                expected,
                1e-5,
            )


@each_case
def test_golden_numbers_come_from_the_record(case, original, names, request):
    """``make test-parity ARGS='-k golden -s --print-golden'`` prints them."""
    recipe = small(case.recipe_name)
    tokens = draw_tokens(case.recipe_name, recipe)
    params = [started(case, original, names)]
    packed = [case.pack(tokens[n : n + case.lanes]) for n in range(0, len(tokens), case.lanes)]
    now = {}
    original.feed(lambda _: now)
    forget(case, original, 0)
    first = None
    for step in range(STEPS):
        losses = forward(case, original, packed, case.last)
        gradients = mean_gradients(case, original, names, losses)
        first = first or (losses, gradients)
        per_rank = recipe.lanes * recipe.stages[0].lane_len / 8 if case.summed else 1
        now |= {
            name: value * np.float32(per_rank) for name, value in names.theirs(gradients).items()
        }
        original.run([step])
        params.append(names.ours(original.parameters()))
    found = summary(*first, params)
    if request.config.getoption("--print-golden", False):
        print("\n" + paste(case.recipe_name, found))
    else:
        same(case.recipe_name, found)


@pytest.mark.parametrize("name", ["r21", "r29"])
def test_fp8_head(name, clone, folders, agree):
    """The head's product and both its gradients by the operators' own bodies, on what has passed
    through bf16."""
    case = CASES[name]
    original = case.original(clone, folders[name], exact=False)
    head = original["model"].lm_head
    theirs = (head.x_s, head.w_s, head.grad_s)
    ours = case.recipe().loss.__globals__["HEAD_SCALES"]

    rng = np.random.default_rng(0)
    x, logits = (
        rng.standard_normal((64, head.in_features)),
        3 * rng.standard_normal((64, head.out_features)),
    )
    w = 0.05 * rng.standard_normal((head.out_features, head.in_features))
    g = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    g[np.arange(64), rng.integers(0, 256, 64)] -= 1
    x, w, g = (jnp.asarray(a, jnp.bfloat16) for a in (x, w, g))
    # ours is the gradient of a token's own loss
    mean = 1 if case.summed else case.recipe().stages[0].lane_len

    def run(rank):
        tensors = [torch.from_numpy(np.array(a, np.float32)) for a in (x, w, g)]
        product, *kept = rank.namespace["mm_op"].body(*tensors[:2], *theirs)
        gradients = rank.namespace["mm_backward_op"].body(tensors[2] / mean, *kept, *theirs)
        return [product, *(mean * a for a in gradients)], [a.float() for a in kept]

    (expected, kept) = ([a.float().numpy() for a in part] for part in original.each(run, [0])[0])
    found, pull = jax.vjp(lambda x, w: fp8.matmul(x, w, ours), x, w)
    # Record 29 divides x by what is no power of two, we by the nearest bf16: one number in fifty
    # rounds otherwise.
    close = 1e-3 if name == "r21" else 2e-2
    stored = [
        np.asarray(fp8.quantise(a, scale, fp8.E4M3), np.float32)
        for a, scale in ((x, ours.x), (w, ours.w))
    ]
    agree(name, "FP8 head", stored, kept, close)
    agree(name, "FP8 head", [found, *pull(g)], expected, max(close, 4e-3))
