"""The tables of a run in the host's memory: a step is given the rows that its tokens name, and
returns their gradients.

A step's rows are gathered while the devices still compute the step before. Its gradients come back
while they compute the next one. While the last step before an update is computed, rows that only
earlier ones named are updated. The step after it waits for its gradients, and for the update of the
rows that both name. The others are updated while it is computed.

Rows and gradients lie in memory that devices copy from and to by themselves
(:mod:`jspeed.host_table.pinned`). Each of several processes does all this for its share of the rows
(:mod:`jspeed.host_table.shares`).
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any, NamedTuple

import jax
import ml_dtypes
import numpy as np
from jax.sharding import Mesh
from numpy.typing import NDArray

from jspeed._dataloader import RowTable
from jspeed.base import processes
from jspeed.base.beside import split
from jspeed.base.cores import cores
from jspeed.errors import BadInput
from jspeed.host_table.checkpoint import load_share, save
from jspeed.host_table.pinned import Buffer, fetched, to_host
from jspeed.host_table.shares import LEFT_OUT, Share, neighbours, share_of
from jspeed.parallel.mesh import batch_lanes, put_lanes, whole
from jspeed.recipe import ParamSpec, Recipe, Stage
from jspeed.run.compute.accumulators import number_due
from jspeed.run.compute.device import Placement
from jspeed.run.compute.division import cut, sub_lanes_of
from jspeed.run.compute.host_tables import BUFFERS, SHARES, Asked, Rows, file_of, files_of
from jspeed.run.compute.program import Program, eval_parts

Found = dict[str, NDArray[np.int32]]  # rows of each table, [B, ids] or those of Share.asked


class Pending(NamedTuple):
    """A step whose gradients of a table wait for its update."""

    rows: NDArray[np.int32]  # of Found, in one list
    gradients: list[NDArray[Any]]  # in the same order, in parts
    loss: jax.Array


class TablesOfRun:
    """A :class:`jspeed.run.compute.host_tables.HostTables` of the tables of ``recipe.on_host``.

    Raises :class:`BadInput` where memory has no room for half of the rows, or a table is not of
    bf16.
    """

    def __init__(self, recipe: Recipe, mesh: Mesh) -> None:
        self._specs, self._mesh = recipe.on_host, mesh
        self._share, self._beside = share_of(mesh), neighbours()
        self._tables = {path: self._make(path) for path in self._specs}
        self._names = {path: jax.jit(recipe.named_rows[path]) for path in self._specs}
        self._rates = rates(recipe)
        self._pending: dict[str, list[Pending]] = {path: [] for path in self._specs}
        self._worker = ThreadPoolExecutor(1, "rows of tables")
        self._futures: list[Future[None]] = []
        # of an update under way: when rows that its last step did not name are done, and those that
        # it named; by table, the update's number and the rows of waiting gradients to follow; when
        # all are done
        self._begun: Future[None] | None = None
        self._later: Found = {}
        self._ended: Future[None] | None = None
        self._due: dict[str, tuple[int, NDArray[np.integer[Any]]]] = {}
        self._buffers: dict[tuple[Any, ...], Any] = {}

    def serve(self, recipe: Recipe, placement: Placement, program: Program) -> Program:
        """Return ``program`` with calls, first state and evaluations that use the tables."""
        mesh = placement.mesh

        def of_stage(stage: Stage, steps: Sequence[Any], parts: int) -> tuple[Any, ...]:
            inputs = inputs_of(recipe, stage, mesh, parts)
            due = (number_due(recipe, stage, phase) for phase in range(recipe.period))
            return tuple(
                self._step(mesh, step, inputs, number)
                for step, number in zip(steps, due, strict=True)
            )

        calls = tuple(map(of_stage, recipe.stages, program.steps, program.parts))

        def init(seed: int) -> Any:
            self._begin()
            return program.init(seed)

        def in_parts(run: Callable[..., Any], tokens: int) -> Callable[..., Any]:
            parts, rows = eval_parts(recipe, program.eval_lanes, mesh, tokens)
            return partial(self._evaluate, recipe, mesh, run, rows // parts)

        accuracy = program.accuracy and in_parts(program.accuracy, recipe.eval_len)
        evaluate = in_parts(program.evaluate, program.micro_tokens)
        return replace(
            program, init=init, calls=calls, evaluate=evaluate, accuracy=accuracy, tables=self
        )

    def rows(self, tokens_BT: NDArray[Any]) -> dict[str, NDArray[Any]]:
        """Return the rows that inputs name in each table, bf16 ``[B, ids, D]``."""
        self.wait()
        found = {}
        with jax.transfer_guard("allow"):
            for path, rows in self._named(tokens_BT).items():
                table, own = self._tables[path], self._share.own(self._specs[path], rows)
                # zeros but of one device of the process that has a row
                places = np.zeros(
                    (self._share.devices, *rows.shape, table.width), ml_dtypes.bfloat16
                )
                table.gather(own.reshape(-1), places[0].reshape(-1, table.width))
                found[path] = np.sum(self._of_all(places), axis=0)
        return found

    def wait(self) -> None:
        """Wait until the gradients of all steps have come back, and the updates are made.

        Raises :class:`BadInput` for one that failed, as of a table that is full."""
        if self._begun:
            self._submit(self._end_update)
        self._begun, self._later = None, {}
        self._finish()

    def save(self, folder: Path) -> None:
        """Write this process's share of each table into ``folder``; between two updates, where no
        gradients wait."""
        self.wait()
        for path, table in self._tables.items():
            spec, file = self._specs[path], file_of(folder, path, processes.index())
            save(table, file, begin=self._share.begin(spec), of=spec.shape[0])

    def load(self, folder: Path) -> None:
        """Put the tables that were saved into ``folder``, by any number of processes, in the place
        of these."""
        self._begin()
        for path, table in self._tables.items():
            files = files_of(folder, path) or [file_of(folder, path)]
            load_share(table, files, begin=self._share.begin(self._specs[path]))

    def whole(self) -> dict[str, NDArray[Any]]:
        """Return every row of each table, bf16 ``[V, D]``."""
        self.wait()
        found = {}
        for path, table in self._tables.items():
            part = table.read(0, table.used)
            own = np.zeros((table.num_rows, table.width), ml_dtypes.bfloat16)
            own[part.rows] = part.weights
            with jax.transfer_guard("allow"):
                found[path] = self._of_all(own)[: self._specs[path].shape[0]]
        return found

    def _of_all(self, own: NDArray[Any]) -> NDArray[Any]:
        """Return the rows of all processes, of which this one has its ``own``, as many for each
        device."""
        if self._share.owners == 1:
            return own
        return whole(put_lanes(own, batch_lanes(self._mesh)))

    def _make(self, path: str) -> RowTable:
        return make(path, self._specs[path], self._share, self._beside)

    def _begin(self) -> None:
        """Begin with tables of zeros."""
        self.wait()
        for path, table in self._tables.items():
            self._pending[path] = []
            if table.updates:
                self._tables[path] = self._make(path)

    def _step(
        self, mesh: Mesh, step: Any, inputs: Callable[[Any], NDArray[Any]], due: int
    ) -> Callable[..., Any]:
        updated = tuple(path for path, spec in self._specs.items() if due % spec.every == 0)

        def call(state: Any, tokens: NDArray[Any]) -> tuple[Any, dict[str, jax.Array]]:
            with jax.transfer_guard("allow"):
                placed = put_lanes(self._share.lanes(tokens), batch_lanes(mesh))
                found, given = self._given(self._named(inputs(tokens)), mesh)
            state, metrics = step(state, placed, given)
            with jax.transfer_guard("allow"):
                gradients = {path: to_host(its) for path, its in metrics.pop("rows").items()}
            if updated:
                self._later = {path: found[path] for path in updated}
                self._begun = self._submit(self._begin_update, self._later)
            self._submit(self._take, found, gradients, metrics["loss"])
            return state, metrics

        return call

    def _evaluate(
        self,
        recipe: Recipe,
        mesh: Mesh,
        run: Any,
        at_once: int,
        params: Any,
        rows: jax.Array,
        targets: jax.Array,
        impossible: jax.Array | None,
    ) -> NDArray[np.float32]:
        """Return what ``run`` finds for ``at_once`` rows after the other: fp32 ``[rows, T]``."""
        self.wait()
        found: list[Any] = []
        with jax.transfer_guard("allow"):
            arrays = whole(rows), whole(targets)
            for first in range(0, len(arrays[0]), at_once):
                part = [array[first : first + at_once] for array in arrays]
                named = self._named(split(recipe.beside, part[0])[0][:, :-1])
                placed = (put_lanes(self._share.lanes(array), batch_lanes(mesh)) for array in part)
                found.append(run(params, *placed, impossible, self._given(named, mesh)[1]))
                if len(found) > 1:  # one is in flight while the next rows are gathered
                    found[-2] = np.asarray(found[-2])
            return np.concatenate([np.asarray(each) for each in found])

    def _named(self, tokens_BT: NDArray[Any]) -> Found:
        """Return the rows that tokens name, found beside the devices' own work."""
        with jax.default_device(host_device()):
            return {
                path: np.asarray(names(tokens_BT), np.int32) for path, names in self._names.items()
            }

    def _given(self, named: Found, mesh: Mesh) -> tuple[Found, Rows]:
        """Return which rows this process gives its devices as tokens have ``named`` some,
        ``[B, ids]``, and what the program is given."""
        share = self._share
        found = {path: share.asked(self._specs[path], rows) for path, rows in named.items()}
        given = self._gather(found, mesh)
        if share.owners == 1:
            return found, given
        ids = {
            path: put_lanes(share.lanes(rows), batch_lanes(mesh)) for path, rows in named.items()
        }
        return found, {path: Asked(ids[path], given[path]) for path in given}

    def _gather(self, found: Found, mesh: Mesh) -> dict[str, jax.Array]:
        """Put the rows ``found`` in each table on the devices, in their places."""
        buffers = {path: self._buffer(path, rows_BI.shape, mesh) for path, rows_BI in found.items()}
        again = {path: named_in(found[path], rows) for path, rows in self._later.items()}
        for update in (self._ended, self._begun):
            if update:
                update.result()
        now = {path: np.where(again[path], LEFT_OUT, found[path]) for path in again}
        self._write(found | now, buffers)
        if self._begun:
            due = {path: named_in(rows, found[path]) for path, (_, rows) in self._due.items()}
            self._submit(self._end_update, due)
            self._begun, self._later = None, {}
            self._finish()
            self._ended = self._submit(self._end_update)
        self._write({path: np.where(again[path], found[path], LEFT_OUT) for path in again}, buffers)
        return {path: buffer.put() for path, buffer in buffers.items()}

    def _buffer(self, path: str, shape: tuple[int, ...], mesh: Mesh) -> Buffer:
        """Return one that no program reads, for rows of a table in this shape."""
        if (path, shape) not in self._buffers:
            devices, owners = self._share.devices, self._share.owners
            whole = (shape[0] // devices * owners, *shape[1:], self._tables[path].width)
            fresh = [Buffer(whole, batch_lanes(mesh)) for _ in range(BUFFERS)]
            self._buffers[path, shape] = cycle(fresh)
        return next(self._buffers[path, shape])

    def _write(self, found: Found, buffers: dict[str, Buffer]) -> None:
        """Copy the rows ``found`` in each table, but those left out, to their places."""
        for path, rows_BI in found.items():
            table = self._tables[path]
            for part, lanes in buffers[path].parts:
                table.gather(rows_BI[lanes].reshape(-1), part.reshape(-1, table.width))

    def _begin_update(self, named: Found) -> None:
        """Update the rows of gradients that wait but those ``named`` by the last step, which is
        computed meanwhile; in a thread."""
        for path, last in named.items():
            number = self._tables[path].updates
            waiting = [step.rows for step in self._pending[path]]
            rows = np.concatenate([np.zeros(0, np.int32), *waiting])
            again = named_in(rows, last)
            if len(rows):
                self._update(path, number, np.where(again, LEFT_OUT, rows))
            later = np.where(again, rows, LEFT_OUT), last.reshape(-1)
            self._due[path] = number, np.concatenate(later)

    def _take(self, found: Found, gradients: Rows, loss: jax.Array) -> None:
        """Keep the ``gradients`` of a step until the next update; in a thread."""
        for path, array in gradients.items():
            self._pending[path].append(Pending(found[path].reshape(-1), fetched(array), loss))

    def _end_update(self, some: dict[str, NDArray[np.bool_]] | None = None) -> None:
        """Update the rows that are still due, or ``some`` of them; in a thread."""
        for path, (number, rows) in [*self._due.items()]:
            if some:
                self._update(path, number, np.where(some[path], rows, LEFT_OUT))
                self._due[path] = number, np.where(some[path], LEFT_OUT, rows)
            else:
                self._update(path, number, rows)
                del self._due[path]
                self._pending[path] = []

    def _submit(self, work: Callable[..., None], *given: Any) -> Future[None]:
        """Let the thread do ``work`` next, after what it has to do."""
        self._futures.append(self._worker.submit(work, *given))
        return self._futures[-1]

    def _finish(self) -> None:
        """Wait for all that the thread has to do; raises what it raised."""
        futures, self._futures = self._futures, []
        for future in futures:
            future.result()

    def _update(self, path: str, number: int, rows: NDArray[np.integer[Any]]) -> None:
        """Make update ``number`` of a table by the gradients that wait, which are of ``rows``."""
        table = self._tables[path]
        rates = {name: float(values[number]) for name, values in self._rates[path].items()}
        waiting = self._pending[path]
        # in an array the sum of those which a device sends for a row is rounded, as it would be
        parts = [
            part
            for step in waiting
            for of_device in step.gradients
            for part in np.split(of_device.reshape(-1, table.width), self._share.owners)
        ]
        try:
            table.update(number, rows, parts, **rates)
        except BadInput as error:
            if all(np.isfinite(float(step.loss)) for step in waiting):
                begin = self._share.begin(self._specs[path])
                part = f"the part of {path} from row {begin} on" if begin else path
                raise BadInput(f"{part}: {error}") from None
            # else the loop ends the run as diverged


def named_in(rows: NDArray[Any], others: NDArray[Any]) -> NDArray[np.bool_]:
    """Return which of ``rows`` are among ``others``."""
    return np.isin(rows, others, kind="table")


def make(path: str, spec: ParamSpec, share: Share, beside: int) -> RowTable:
    """Make a process's ``share`` of a table, of zeros, with room for all of its rows or as many as
    memory has left.

    ``beside``: processes that make one of this machine's memory.
    """
    rows, width = share.rows(spec), spec.shape[1]
    if np.dtype(spec.dtype) != ml_dtypes.bfloat16:
        raise BadInput(
            f"--table host: {path} is of {np.dtype(spec.dtype)} and a table in the host's memory is"
            " of bfloat16; --set COMPUTE=bfloat16, or use --table device"
        )
    threads = max(1, cores() // beside)
    for part in SHARES:
        room = max(1, int(part * rows))
        try:
            if beside > 1:  # tables of all, which take no memory yet
                RowTable(beside * rows, width, capacity=beside * room, threads=1)
            return RowTable(rows, width, capacity=room, threads=threads)
        except BadInput:
            if part == SHARES[-1]:
                raise
    raise AssertionError


def inputs_of(
    recipe: Recipe, stage: Stage, mesh: Mesh, parts: int
) -> Callable[[NDArray[Any]], NDArray[Any]]:
    """Return what finds the inputs of a batch whose rows are looked up: those of its lanes, or of
    the pieces into which a step over ``parts`` micro-batches cuts them."""
    pieces = sub_lanes_of(recipe, stage, mesh, parts)
    if pieces == 1:
        return lambda tokens: split(recipe.beside, tokens)[0][:, :-1]
    in_pieces = jax.jit(partial(cut, recipe, stage, pieces))

    def inputs(tokens: NDArray[Any]) -> NDArray[Any]:
        with jax.default_device(host_device()):
            return np.asarray(in_pieces(np.asarray(tokens, np.int32))[0])[:, :-1]

    return inputs


def rates(recipe: Recipe) -> dict[str, dict[str, NDArray[np.float32]]]:
    """Return the rates of every update of a run of ``recipe``, by table and name."""
    found = {}
    optimizers = recipe.row_optimizers()
    stages = [stage for stage in recipe.stages for _ in range(stage.steps)]
    due = [number_due(recipe, stage, step % recipe.period) for step, stage in enumerate(stages)]
    for path, spec in recipe.on_host.items():
        updates = sum(number % spec.every == 0 for number in due)
        with jax.transfer_guard("allow"), jax.default_device(host_device()):
            its = optimizers[path].rates(max(1, updates))
            found[path] = {name: np.asarray(values) for name, values in its.items()}
    return found


def host_device() -> jax.Device:
    """Return JAX's device for the host. Raises :class:`BadInput` where it has none."""
    try:
        return jax.local_devices(backend="cpu")[0]
    except RuntimeError:
        raise BadInput(
            "--table host computes row numbers on the CPU, and JAX has no CPU backend; set"
            " JAX_PLATFORMS=cuda,cpu"
        ) from None
