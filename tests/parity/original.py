"""Execute a record's own script on a CPU in fp32, with GPUs and processes replaced."""

import ast
import builtins
import io
import os
import pathlib
import re
import subprocess
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np

from .cpu_stand_ins import (
    OPERATORS,
    Abandoned,
    Anything,
    BlockMask,
    Distributed,
    Library,
    OnHost,
    Over,
    Work,
    World,
    flash_attn_varlen_func,
    flex_attention,
    scaled_mm,
    torch,
)
from .ours import Named

Replacement = tuple[str, str] | tuple[str, str, int]


def text_of(clone: str, path: str, revision: str = "HEAD") -> str:
    """Return a file of the clone; of a log only the source it begins with."""
    git = ["git", "-C", clone, "show", f"{revision}:{path}"]
    text = subprocess.run(git, capture_output=True, text=True, check=True).stdout
    return re.split(r"^={100}$", text, maxsplit=1, flags=re.MULTILINE)[0]


def replaced(text: str, replacements: Iterable[Replacement]) -> str:
    """Replace each ``(old, new)``, or ``(old, new, times)``, which must occur exactly once, or so
    many times."""
    for old, new, *rest in replacements:
        times = rest[0] if rest else 1
        if (found := text.count(old)) != times:
            raise AssertionError(
                f"the record's text has {old!r} {found} times, not {times}: another version?"
            )
        text = text.replace(old, new)
    return text


class Original:
    """A record's script in a world of ``world`` ranks, each a thread, executed up to its training
    loop.

    ``replacements`` shrink it (see :func:`replaced`). ``modules`` are what it imports and CPUs have
    not, by dotted name, or a function that makes them for a rank; ``formulas`` take the place of
    its functions that launch kernels, once the script is executed. ``folder`` holds what the script
    reads by relative path, such as ``data/fineweb10B``. With ``exact``, bf16 and fp16 become fp32
    and custom operators their formulas in ``operators``; without, their bodies run with FP8
    products emulated.
    """

    def __init__(
        self,
        text: str,
        replacements: Iterable[Replacement] = (),
        *,
        folder: pathlib.Path,
        world: int = 8,
        modules: Mapping[str, Any] | Callable[[int], dict[str, Any]] | None = None,
        formulas: Mapping[str, Any] | None = None,
        operators: Mapping[str, Callable[..., Any]] | None = None,
        exact: bool = True,
    ):
        self.text = replaced(text, replacements)
        self.exact = exact
        before, loop = _split(ast.parse(self.text))
        self._loop = compile(loop, "training loop of the record", "exec")
        start = compile(before, "script of the record", "exec")
        self.world = World(world)
        self.ranks = [
            Rank(
                number,
                self,
                folder,
                modules(number) if callable(modules) else dict(modules or {}),
                {**OPERATORS, **(operators or {})},
            )
            for number in range(world)
        ]

        def begin(rank: Rank) -> None:
            exec(start, rank.namespace)
            for name, formula in (formulas or {}).items():
                assert name in rank.namespace, f"the record has no function {name}"
                rank.namespace[name] = formula

        self.each(begin)

    def __getitem__(self, name: str) -> Any:
        """What rank 0 calls ``name``."""
        return self.ranks[0].namespace[name]

    def each(
        self, function: Callable[["Rank"], Any], ranks: Sequence[int] | None = None
    ) -> list[Any]:
        """Return ``function(rank)`` of every rank, or of some, at once."""
        chosen = [
            self.ranks[number] for number in (range(len(self.ranks)) if ranks is None else ranks)
        ]
        results: list[Any] = [None] * len(chosen)
        errors: list[BaseException] = []

        def work(place: int) -> None:
            try:
                with OnHost(self.exact):
                    results[place] = function(chosen[place])
            except BaseException as error:
                errors.append(error)
                self.world.fail()

        threads = [threading.Thread(target=work, args=(place,)) for place in range(len(chosen))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise next((error for error in errors if not isinstance(error, Abandoned)), errors[0])
        return results

    def run(self, steps: Iterable[int]) -> None:
        """Execute the body of the script's own training loop for ``steps``."""
        steps = list(steps)

        def go(rank: Rank) -> None:
            rank.namespace["steps_of_the_test"] = steps
            exec(self._loop, rank.namespace)

        self.each(go)

    def load(self, values: Named | Callable[[int], Named], model: str = "model") -> None:
        """Set the parameters of the model by name, on every rank or to ``values(rank)``; all names
        must be there."""

        def fill(rank: Rank) -> None:
            named = dict(rank.namespace[model].named_parameters())
            own = values(rank.number) if callable(values) else values
            assert named.keys() == own.keys(), sorted(named.keys() ^ own.keys())
            with torch.no_grad():
                for name, p in named.items():
                    p.copy_(torch.from_numpy(np.ascontiguousarray(own[name])).view(p.shape))

        self.each(fill)

    def shapes(self, model: str = "model") -> dict[str, tuple[int, ...]]:
        """Shape of every parameter of the model."""
        return {name: tuple(p.shape) for name, p in self[model].named_parameters()}

    def parameters(self, model: str = "model", rank: int = 0) -> dict[str, np.ndarray]:
        """The parameters of a rank's model by name."""
        named = self.ranks[rank].namespace[model].named_parameters()
        return {name: p.detach().float().numpy().copy() for name, p in named}

    def gradients(self, model: str = "model", rank: int = 0) -> dict[str, np.ndarray]:
        """The gradients of a rank's model by name; zeros where there is none."""
        named = self.ranks[rank].namespace[model].named_parameters()
        return {
            name: np.zeros(p.shape, np.float32)
            if p.grad is None
            else p.grad.detach().float().numpy().copy()
            for name, p in named
        }

    def feed(self, grads: Callable[[int], Mapping[str, np.ndarray]], model: str = "model") -> None:
        """From here on the training loop's backward pass n (from 0) leaves the gradients
        ``grads(n)``, by name."""

        for rank in self.ranks:
            rank.namespace[model] = Fed(rank.model(model), grads)


@dataclass
class Rank:
    """One process of the script: its namespace, and the losses that its model has formed, call by
    call."""

    number: int
    original: Original
    folder: pathlib.Path
    modules: dict[str, Any]
    operators: dict[str, Callable[..., Any]]
    losses: list[np.ndarray] = field(default_factory=list)
    namespace: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.namespace |= {
            "__name__": "record",
            "__builtins__": {**vars(builtins), **self._builtins()},
        }

    def model(self, name: str = "model") -> Any:
        """The script's model, whether or not gradients are fed in its place."""
        found = self.namespace[name]
        return found.model if isinstance(found, Fed) else found

    def _builtins(self) -> dict[str, Any]:
        modules = self._modules()

        def load(
            name: str, globals: Any = None, locals: Any = None, fromlist: Any = (), level: int = 0
        ) -> Any:
            wanted = name if fromlist else name.split(".")[0]
            if wanted in modules:
                return modules[wanted]
            return builtins.__import__(name, globals, locals, fromlist, level)

        def read(path: Any, mode: str = "r", *rest: Any, **more: Any) -> Any:
            if str(path) == "record":
                return io.StringIO(self.original.text)
            return io.StringIO() if set(mode) & set("aw") else open(path, mode, *rest, **more)

        return {"__import__": load, "open": read, "print": lambda *_, **__: None}

    def _modules(self) -> dict[str, Any]:
        world, number = self.original.world, self.number
        environment = {
            **os.environ,
            "RANK": str(number),
            "LOCAL_RANK": str(number),
            "WORLD_SIZE": str(world.size),
        }
        environment["DATA_PATH"] = str(self.folder)
        here = self.folder

        class Here(type(pathlib.Path())):  # type: ignore[misc]
            @classmethod
            def cwd(cls) -> Any:
                return cls(here)

        functional = Over(torch.nn.functional, cross_entropy=self._cross_entropy)
        library = Library(self.operators, self.original.exact)
        dist = Distributed(world, number)
        over = {
            "cuda": Anything(),
            "_inductor": Anything(),
            "_dynamo": Anything(),
            "compile": lambda made=None, **_: (
                made if made is not None else (lambda function: function)
            ),
            "device": lambda *_: torch.device("cpu"),
            "nn": Over(torch.nn, functional=functional),
            "distributed": dist,
            "futures": SimpleNamespace(
                collect_all=lambda works: Work(lambda: [w.wait() for w in works]), Future=Work
            ),
            "library": library,
            "ops": library.ops,
            "_scaled_mm": scaled_mm,
        }
        if self.original.exact:
            over["bfloat16"] = over["float16"] = torch.float32
        proxy = Over(torch, **over)
        silent = SimpleNamespace(run=lambda *_, **__: SimpleNamespace(stdout=""), PIPE=None)
        attention = SimpleNamespace(BlockMask=BlockMask, flex_attention=flex_attention)
        return {
            "torch": proxy,
            "torch.nn": proxy.nn,
            "torch.nn.functional": functional,
            "torch.distributed": dist,
            "torch.nn.attention.flex_attention": attention,
            "flash_attn_interface": SimpleNamespace(flash_attn_varlen_func=flash_attn_varlen_func),
            "triton": Anything(),
            "triton.language": Anything(),
            "triton.tools.tensor_descriptor": Anything(),
            "os": Over(os, environ=environment, makedirs=lambda *_, **__: None),
            "sys": SimpleNamespace(argv=["record"], version="", path=[]),
            "pathlib": SimpleNamespace(Path=Here),
            "subprocess": silent,
            **self.modules,
        }

    def _cross_entropy(
        self, logits: Any, targets: Any, reduction: str = "mean", **rest: Any
    ) -> Any:
        each = torch.nn.functional.cross_entropy(logits, targets, reduction="none", **rest)
        self.losses.append(each.detach().numpy().copy())
        return {"mean": each.mean, "sum": each.sum, "none": lambda: each}[reduction]()


class Fed:
    """A model whose forward pass is nothing and whose backward pass leaves given gradients."""

    def __init__(self, model: Any, grads: Callable[[int], Mapping[str, np.ndarray]]):
        self.__dict__.update(model=model, grads=grads, calls=0, training=True)

    def __call__(self, *_: Any, **__: Any) -> Any:
        return SimpleNamespace(backward=self._backward) if self.training else torch.zeros(())

    def _backward(self) -> None:
        given = self.grads(self.calls)
        self.__dict__["calls"] += 1
        for name, p in self.model.named_parameters():
            p.grad = torch.from_numpy(np.array(given[name])).view(p.shape)

    def train(self) -> None:
        self.__dict__["training"] = True

    def eval(self) -> None:
        self.__dict__["training"] = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)


def _split(tree: ast.Module) -> tuple[ast.Module, ast.Module]:
    """Return what comes before the loop over training steps, and the loop, over other steps and of
    one trial."""
    body: list[ast.stmt] = []
    todo = list(tree.body)
    while todo:
        statement = todo.pop(0)
        if isinstance(statement, ast.For) and isinstance(statement.target, ast.Name):
            if ast.unparse(statement.iter) == "range(num_trials)":
                todo = statement.body + todo
                continue
            if ast.unparse(statement.iter) == "range(train_steps + 1)":
                statement.iter = ast.copy_location(
                    ast.Name("steps_of_the_test", ast.Load()), statement.iter
                )
                return ast.Module(body, []), ast.Module([statement], [])
        body.append(statement)
    raise AssertionError("the record has no loop over range(train_steps + 1)")
