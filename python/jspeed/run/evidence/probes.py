"""Evidence beside a run's loss: validity probes, conditions that a loss must meet to count as a
language-model loss, and the hashes of the tokens that it saw."""

import hashlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.errors import JaxRuntimeError
from numpy.typing import NDArray

from jspeed.base import processes
from jspeed.base.beside import looked_up, split
from jspeed.base.cores import cores
from jspeed.base.files import sha256_of
from jspeed.base.processes import broadcast, gather
from jspeed.data import open_shards
from jspeed.data.overlap import TokenRange, overlap, trained_on
from jspeed.errors import BadInput, type_and_line
from jspeed.parallel.mesh import put, replicated
from jspeed.parallel.replicas import drift
from jspeed.recipe import Context
from jspeed.record.provenance import checksum
from jspeed.record.schema import Data, Holdout
from jspeed.run import evaluate
from jspeed.run.compute.host_tables import with_given
from jspeed.run.compute.program import eval_context
from jspeed.run.compute.score import losses, without_padding
from jspeed.run.compute.side_by_side import beside
from jspeed.run.compute.step import State, replicated_on_all_devices, without_jit
from jspeed.run.compute.warm_up import warm_ups
from jspeed.run.evaluate import look_up, put_padded, to_devices, token_losses, weighted_mean
from jspeed.run.evidence import causality, stream
from jspeed.run.setup import Setup, open_loader

Verdict = dict[str, Any]

# The share of validation blocks that may occur verbatim in the training data. Text without
# near-duplicates has 0.1 % of them (64 tokens, GPT-2 vocabulary), the standard library 0.2 % (64
# bytes).
OVERLAP = 0.02
SAME_LOSS = 1e-3  # nats of a mean over 128 tokens: bf16 logits of two matmul shapes differ by less


def run_all(
    setup: Setup, state: State, found: NDArray[np.float32], steps: int, fed: str | None
) -> dict[str, Verdict]:
    """Return the verdicts (``passed`` and what was measured) on the run that ended in ``state``,
    whose losses of the validation lanes were ``found``.

    ``fed`` is the hash of the batches of its ``steps``, None if it is not known. With several
    processes each must call this, and gets the same.
    """
    params, start = state["params"], setup.at_start
    compared = comparison(setup, params, setup.data.lanes[0])
    before = checksum(state, setup.program.sums)
    repeated = token_losses(setup.program.evaluate, params, setup.validation)
    loss, again = (weighted_mean(each, setup.validation) for each in (found, repeated))
    lanes = setup.data.lanes
    verdicts = guarded(
        ("causality",),
        lambda: {"causality": causality_of_run(setup, params, lanes, found, repeated)},
    )
    verdicts["evaluation_stays_on_device"] = stays_on_device(setup)
    verdicts |= guarded(("normalisation",), lambda: {"normalisation": normalisation(compared)})
    after = checksum(state, setup.program.sums)
    return verdicts | {
        "evaluation_leaves_state": {"passed": after == before, "state": before},
        "evaluation_repeats": {"passed": again == loss, "again": again},
        "replicas_agree": replicas_agree(state),
        "warm_up_leaves_state": {"passed": start.initial_checksum == start.after_warm_up}
        | {
            "state": start.initial_checksum,
            "untimed_steps": warm_ups(setup.placement.mesh) * sum(map(len, setup.program.steps)),
            "on": "zeros",
        },
        "no_overlap": no_overlap(setup),
        "stream_repeats": stream_repeats(setup, steps, fed),
    }


def evaluations_after(lanes: int) -> int:
    """Return how many evaluations of ``lanes`` lanes a run makes after its clock has stopped.

    The losses, the losses again, those of causality (ends of lanes, lanes replaced), and the second
    text.
    """
    return 1 + 1 + (causality.passes_over(lanes) + 1) + 1


def guarded(names: Sequence[str], probe: Callable[[], dict[str, Verdict]]) -> dict[str, Verdict]:
    """Return what ``probe`` finds; one that raises has failed under its ``names``, and the run
    keeps its record.

    With several processes an error of the devices is raised: the other processes wait in a
    collective.
    """
    try:
        return probe()
    except Exception as error:  # whatever a recipe or a library raises
        if isinstance(error, JaxRuntimeError) and processes.count() > 1:
            raise
        return {name: {"passed": False, "raised": type_and_line(error)} for name in names}


def replicas_agree(state: State) -> Verdict:
    """Compare the copies of parameters and optimizer state that the devices of each process hold,
    not those of several processes; all know what each found."""
    found: dict[str, float] = {}
    for part in gather(
        "replicas", drift({"params": state["params"], "optimizer": state["optimizer"]})
    ):
        found |= {path: max(far, found.get(path, 0.0)) for path, far in part.items()}
    worst = max(found, key=lambda path: found[path], default=None)
    return {
        "passed": not found,
        "largest": found[worst] if worst else 0.0,
        "where": worst,
        "arrays": len(found),
    }


def no_overlap(setup: Setup) -> Verdict:
    """Compare training and validation tokens; process 0 reads the files and shares the verdict."""

    def compared() -> dict[str, Verdict]:
        found = overlap_of_run(setup)
        return {"no_overlap": {"passed": found <= OVERLAP, "share": found}}

    verdicts = guarded(("no_overlap",), compared) if processes.index() == 0 else None
    return broadcast("overlap", verdicts)["no_overlap"]


def stream_repeats(setup: Setup, steps: int, fed: str | None) -> Verdict:
    """Read the run's batches again, from what its shards' names stand for now: they must be those
    that it was ``fed``, and the files those of its start.

    Not with more beside the tokens, nor after a resume of several processes, where it is unknown.
    """
    read, recipe = setup.data, setup.recipe

    def same() -> dict[str, Any]:
        if fed is None or recipe.beside:
            return {"stream": None, "changed": changed_files(read.files)}
        shards = open_shards(read.shards.paths)
        with open_loader(recipe, shards, setup.options.seed) as loader:
            again = stream.chain(islice(loader, steps))
        files = changed_files(read.files)
        return {"stream": again, "changed": files + ["tokens"] * (again != fed)}

    def checked() -> dict[str, Verdict]:
        found = gather("stream", same())
        changed = sorted({name for each in found for name in each["changed"]})
        return {"stream_repeats": {"passed": not changed, **found[0], "changed": changed}}

    return guarded(("stream_repeats",), checked)["stream_repeats"]


def changed_files(before: stream.Facts) -> list[str]:
    """Return the names of the files that are no longer what they were."""
    return [
        Path(path).name for path, was in before.items() if stream.facts([Path(path)])[path] != was
    ]


def causality_of_run(
    setup: Setup, params: Any, lanes: np.ndarray, before: np.ndarray, again: np.ndarray
) -> Verdict:
    """Evaluate ``lanes`` (ids ``[R, eval_len + 1]``), whose losses were ``before`` and ``again``,
    with other ends, by the program of all evaluations (:mod:`jspeed.run.evidence.causality`); what
    the loader knows of them is included."""
    recipe, mesh, program = setup.recipe, setup.placement.mesh, setup.program
    validation = to_devices(lanes, program.eval_lanes, recipe, mesh)
    validation.tokenizer_mask = setup.validation.tokenizer_mask

    def losses(inputs: np.ndarray) -> np.ndarray:
        look_up(validation, inputs, setup.data.loader, mesh)
        if recipe.beside is None:
            shape, dtype = validation.lanes.shape, validation.lanes.dtype
            validation.lanes = put_padded(inputs, shape, dtype, mesh)
        return token_losses(program.evaluate, params, validation)

    docs = eval_context(recipe, setup.placement.device).stage.max_docs
    text = causality.Text(lanes, recipe.vocab_size, recipe.data.bos_id, docs)
    entropy = broadcast("entropy", causality.draw_entropy())
    return causality.causality(text, before, again, losses, entropy)


def stays_on_device(setup: Setup) -> Verdict:
    """Look for calls to the host in the evaluation, through which it could keep or learn
    something."""
    calls = sorted(setup.program.host_calls(evaluation=True))
    return {"passed": not calls, "calls": calls}


def normalisation(compared: Callable[[], tuple[jax.Array, jax.Array]]) -> Verdict:
    """Compare the two means of a :func:`comparison`: what is sampled is what was scored."""
    found, expected = jax.device_get(compared())
    error = abs(float(found - expected))
    return {"passed": error <= SAME_LOSS, "error": error}


def comparison(
    setup: Setup, params: Any, lane: np.ndarray
) -> Callable[[], tuple[jax.Array, jax.Array]]:
    """Return what computes two means: of the losses, and of the log-softmax of ``forward``'s
    logits. It is over the whole vocabulary, or, of a canonical recipe, all of it that is possible.

    Means over 128 tokens are compared, because bf16 logits of single tokens depend on the matmul's
    shape. On a CPU a thread begins to trace and compile it.
    """
    recipe, length = setup.recipe, min(setup.recipe.eval_len, 128)
    ctx = eval_context(recipe, setup.placement.device)

    def both(whole: Any, given: Any, ctx: Context) -> tuple[jax.Array, jax.Array]:
        tokens, beside = split(recipe.beside, given[0])
        inputs, targets, ctx = tokens[:, :-1], tokens[:, 1:], replace(ctx, beside=beside)
        # with padding XLA may round one of the two in another way
        whole = with_given(recipe, without_padding(recipe, whole), given[1])
        logits = recipe.forward(whole, inputs, ctx).astype(jnp.float32)
        if ctx.tokenizer_mask is not None:
            bits = jnp.unpackbits(
                ctx.tokenizer_mask[inputs], axis=-1, count=logits.shape[-1], bitorder="little"
            )
            logits = jnp.where(bits == 1, -jnp.inf, logits)
        log_p = jax.nn.log_softmax(logits, axis=-1)
        expected = -jnp.take_along_axis(log_p, targets[..., None], axis=-1)[..., 0]
        found = losses(recipe, whole, inputs, targets, ctx)
        return jnp.mean(found), jnp.mean(expected)

    def compiled() -> Callable[[], tuple[jax.Array, jax.Array]]:
        probe = replicated_on_all_devices(recipe, ctx, setup.placement, both)
        known = looked_up(setup.data.loader, lane[None, : length + 1])
        lanes = tables.rows(lane[None, :length]) if tables else {}
        given = jax.tree.map(
            lambda array: put(array, replicated(mesh)), (known.astype(np.int32), lanes)
        )
        args = params, given, setup.validation.tokenizer_mask
        return partial(probe if without_jit() else probe.lower(*args).compile(), *args)

    mesh, tables = setup.placement.mesh, setup.program.tables
    if setup.placement.device.platform != "cpu" or recipe.beside or tables:
        return lambda: compiled()()
    begun = beside(compiled, setup.placement.device)
    return lambda: begun()()


def data_evidence(setup: Setup, hashed: bool) -> Data:
    """Return run.json's ``data``; hashes are null unless ``hashed``.

    Hashes of shards that can no longer be read are null, so that the record is still written.
    """
    read, position = setup.data, setup.data.loader.state_dict()
    ranges: list[TokenRange] = []
    hashes: list[str | None] = []
    val_sha256 = val_shard = None
    with suppress(OSError, BadInput):
        ranges = trained_on(read.shards, position)
        hashes = [None] * len(ranges)
        if hashed:
            with ThreadPoolExecutor(min(16, cores())) as pool:
                hashes = list(pool.map(lambda part: sha256_of(part.path), ranges))
            val_sha256 = sha256_of_lanes(read.lanes, setup)
            val_shard = sha256_of(read.val_shards.paths[0])
    found: Data = {
        "name": setup.recipe.data.name,
        "fingerprint": read.shards.fingerprint,
        "val_fingerprint": read.val_shards.fingerprint,
        "train_tokens": read.shards.num_tokens,
        "val_tokens": setup.validation.tokens,
        "tokenizer": read.manifest.get("tokenizer"),
        "val_sha256": val_sha256,
        "val_shard_sha256": val_shard,
        "train_shards": [
            {"name": part.path.name, "sha256": digest, "first": part.first, "end": part.end}
            for part, digest in zip(ranges, hashes, strict=True)
        ],
        "position": {
            name: position[name]
            for name in ("step", "epoch", "shard", "offset", "shuffle", "config_hash")
        },
    }
    source = read.manifest.get("source") or {}
    if source.get("kind") == "stdlib":
        found["python"] = source["python"]
    return found


def ids_of(lanes: NDArray[np.unsignedinteger]) -> NDArray[np.unsignedinteger]:
    """Return the ids that the loss of evaluation ``lanes`` is a mean over and the one after them:
    ``[N + 1]``."""
    return np.append(lanes[:, :-1].reshape(-1), lanes[-1, -1])


def sha256_of_lanes(lanes: NDArray[np.unsignedinteger], setup: Setup) -> str:
    """Return the SHA-256 of the ids of evaluation ``lanes``, little-endian in the recipe's
    dtype."""
    return hashlib.sha256(
        ids_of(lanes).astype(setup.recipe.data.dtype.newbyteorder("<")).tobytes()
    ).hexdigest()


def evaluate_holdout(setup: Setup, holdout: evaluate.HoldoutLanes, params: Any) -> Holdout:
    """Evaluate the track's second range of the validation tokens by the program of the first; every
    process must."""
    first, lanes = holdout
    known = looked_up(setup.data.loader, lanes)
    validation = evaluate.to_devices(
        known, setup.program.eval_lanes, setup.recipe, setup.placement.mesh
    )
    validation.tokenizer_mask = setup.validation.tokenizer_mask
    loss = evaluate.validation_loss(setup.program.evaluate, params, validation)
    sha256 = sha256_of_lanes(lanes, setup)
    return {"first": first, "tokens": validation.tokens, "sha256": sha256, "val_loss": loss}


def overlap_of_run(setup: Setup) -> float:
    """Return the share of the validation tokens that occur in the tokens trained on
    (:func:`overlap`)."""
    ranges = trained_on(setup.data.shards, setup.data.loader.state_dict())
    return overlap(ranges, setup.data.shards.dtype, ids_of(setup.data.lanes))
