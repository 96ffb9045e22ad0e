"""The tables of a run in the host's memory: a step is given the rows that its tokens name, and
returns their gradients.

A step's rows are gathered while the devices still compute the step before. Its gradients come back
while they compute the next one. Only the step after an update waits: for the gradients, and for the
update.
"""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
from jax.sharding import Mesh
from numpy.typing import NDArray

from jspeed._dataloader import RowTable
from jspeed.base.beside import split
from jspeed.errors import BadInput
from jspeed.host_table.checkpoint import load, save
from jspeed.parallel.mesh import batch_rows, put_rows
from jspeed.recipe import ParamSpec, Recipe
from jspeed.run.compute.accumulators import number_due
from jspeed.run.compute.device import Placement
from jspeed.run.compute.host_tables import BUFFERS, SHARES
from jspeed.run.compute.program import Program, eval_parts

Found = dict[str, NDArray[np.int32]]  # rows that tokens name in each table, [B, ids]


class TablesOfRun:
    """A :class:`jspeed.run.compute.host_tables.HostTables` of the tables of ``recipe.on_host``.

    Raises :class:`BadInput` where memory has no room for half of the rows, or a table is not of
    bf16.
    """

    def __init__(self, recipe: Recipe) -> None:
        self._specs = recipe.on_host
        self._tables = {path: make(path, spec) for path, spec in self._specs.items()}
        self._names = {path: jax.jit(recipe.named_rows[path]) for path in self._specs}
        self._rates = rates(recipe)
        self._pending: list[tuple[Found, dict[str, NDArray[Any]]]] = []
        self._worker = ThreadPoolExecutor(1, "rows of tables")
        self._futures: list[Future[None]] = []
        self._updating = False
        self._buffers: dict[tuple[Any, ...], Any] = {}

    def serve(self, recipe: Recipe, placement: Placement, program: Program) -> Program:
        """Return ``program`` with calls, first state and evaluations that use the tables."""
        mesh = placement.mesh
        calls = tuple(
            tuple(
                self._step(recipe, mesh, step, number_due(recipe, stage, phase))
                for phase, step in enumerate(steps)
            )
            for stage, steps in zip(recipe.stages, program.steps, strict=True)
        )

        def init(seed: int) -> Any:
            self._begin()
            return program.init(seed)

        def in_parts(run: Callable[..., Any], tokens: int) -> Callable[..., Any]:
            parts, rows = eval_parts(recipe, program.eval_rows, mesh, tokens)
            return partial(self._evaluate, recipe, mesh, run, rows // parts)

        accuracy = program.accuracy and in_parts(program.accuracy, recipe.eval_len)
        evaluate = in_parts(program.evaluate, program.micro_tokens)
        return replace(
            program, init=init, calls=calls, evaluate=evaluate, accuracy=accuracy, tables=self
        )

    def rows(self, tokens_BT: NDArray[Any]) -> dict[str, NDArray[Any]]:
        """Return the rows that inputs name in each table, bf16 ``[B, ids, D]``."""
        self.wait()
        with jax.transfer_guard("allow"):
            named = self._named(tokens_BT)
        return {
            path: self._tables[path].gather(rows.reshape(-1)).reshape(*rows.shape, -1)
            for path, rows in named.items()
        }

    def wait(self) -> None:
        """Wait until the gradients of all steps have come back, and the updates are made.

        Raises :class:`BadInput` for one that failed, as of a table that is full."""
        futures, self._futures, self._updating = self._futures, [], False
        for future in futures:
            future.result()

    def save(self, folder: Path) -> None:
        """Write each table into ``folder``; between two updates, where no gradients wait."""
        self.wait()
        for path, table in self._tables.items():
            save(table, file_of(folder, path))

    def load(self, folder: Path) -> None:
        """Put the tables that were saved into ``folder`` in the place of these."""
        self._begin()
        for path, table in self._tables.items():
            self._tables[path] = load(file_of(folder, path), capacity=table.capacity)

    def whole(self) -> dict[str, NDArray[Any]]:
        """Return every row of each table, bf16 ``[V, D]``."""
        self.wait()
        found = {}
        for path, table in self._tables.items():
            part = table.read(0, table.used)
            found[path] = np.zeros((table.num_rows, table.width), ml_dtypes.bfloat16)
            found[path][part.rows] = part.weights
        return found

    def _begin(self) -> None:
        """Begin with tables of zeros."""
        self.wait()
        self._pending = []
        for path, table in self._tables.items():
            if table.updates:
                self._tables[path] = make(path, self._specs[path])

    def _step(self, recipe: Recipe, mesh: Mesh, step: Any, due: int) -> Callable[..., Any]:
        updated = tuple(path for path, spec in self._specs.items() if due % spec.every == 0)

        def call(state: Any, tokens: jax.Array) -> tuple[Any, dict[str, jax.Array]]:
            if self._updating:
                self.wait()
            with jax.transfer_guard("allow"):
                found = self._named(split(recipe.beside, np.asarray(tokens))[0][:, :-1])
                given = self._gather(found, mesh)
            state, metrics = step(state, tokens, given)
            gradients = metrics.pop("rows")
            with jax.transfer_guard("allow"):
                for array in gradients.values():
                    array.copy_to_host_async()
            self._updating = bool(updated)
            self._futures.append(
                self._worker.submit(self._take, found, gradients, metrics["loss"], updated)
            )
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
            arrays = np.asarray(rows), np.asarray(targets)
            for first in range(0, len(arrays[0]), at_once):
                part = [array[first : first + at_once] for array in arrays]
                named = self._named(split(recipe.beside, part[0])[0][:, :-1])
                placed = (put_rows(array, batch_rows(mesh)) for array in part)
                found.append(run(params, *placed, impossible, self._gather(named, mesh)))
                if len(found) > 1:  # one is in flight while the next rows are gathered
                    found[-2] = np.asarray(found[-2])
            return np.concatenate([np.asarray(each) for each in found])

    def _named(self, tokens_BT: NDArray[Any]) -> Found:
        """Return the rows that tokens name, found beside the devices' own work."""
        with jax.default_device(host_device()):
            return {path: np.asarray(names(tokens_BT)) for path, names in self._names.items()}

    def _gather(self, found: Found, mesh: Mesh) -> dict[str, jax.Array]:
        """Put the rows ``found`` in each table on the devices, ``[B, ids, D]``."""
        given = {}
        for path, rows_BI in found.items():
            table = self._tables[path]
            shape = (*rows_BI.shape, table.width)
            if (path, shape) not in self._buffers:
                fresh = [np.empty(shape, ml_dtypes.bfloat16) for _ in range(BUFFERS)]
                self._buffers[path, shape] = cycle(fresh)
            buffer = next(self._buffers[path, shape])
            table.gather(rows_BI.reshape(-1), buffer.reshape(-1, table.width))
            given[path] = put_rows(buffer, batch_rows(mesh))
        return given

    def _take(
        self,
        found: Found,
        gradients: dict[str, jax.Array],
        loss: jax.Array,
        updated: tuple[str, ...],
    ) -> None:
        """Keep the ``gradients`` of a step, and update the tables that are due; in a thread."""
        self._pending.append((found, {path: np.asarray(g) for path, g in gradients.items()}))
        for path in updated:
            table, rates = self._tables[path], self._rates[path]
            rows = np.concatenate([rows[path].reshape(-1) for rows, _ in self._pending])
            sums = [grads[path].reshape(-1, table.width) for _, grads in self._pending]
            step = table.updates
            its = {name: float(values[step]) for name, values in rates.items()}
            try:
                table.update(step, rows, sums, **its)
            except BadInput:
                if np.isfinite(float(loss)):  # else the loop ends the run as diverged
                    raise
        if updated:
            self._pending = []


def make(path: str, spec: ParamSpec) -> RowTable:
    """Make a table of zeros with room for all of its rows, or as many as memory has left."""
    rows, width = spec.shape
    if np.dtype(spec.dtype) != ml_dtypes.bfloat16:
        raise BadInput(
            f"--table host: {path} is of {np.dtype(spec.dtype)} and a table in the host's memory is"
            " of bfloat16; --set COMPUTE=bfloat16, or use --table device"
        )
    for share in SHARES:
        try:
            return RowTable(rows, width, capacity=max(1, int(share * rows)))
        except BadInput:
            if share == SHARES[-1]:
                raise
    raise AssertionError


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


def file_of(folder: Path, path: str) -> Path:
    """Return the file of the table at ``path`` of the parameters."""
    return folder / f"{path.replace('/', '-')}.safetensors"
