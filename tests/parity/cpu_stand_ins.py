"""CPU stand-ins for CUDA, torch.distributed and custom kernels, to execute a record's script
without GPUs."""

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip(
    "torch", reason="PyTorch is not installed; make test-parity installs it"
)


class Over:
    """A module with some of its names replaced."""

    def __init__(self, module: Any, **over: Any):
        self.__dict__.update(over, _module=module)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


class Anything:
    """Stands for a module of kernels: every name in it, and what calling or indexing gives, is such
    a thing."""

    __version__ = ""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __call__(self, *_: Any, **__: Any) -> Any:
        return self

    def __getitem__(self, _: Any) -> Any:
        return self

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: Any) -> None:
        return None


class OnHost(torch.overrides.TorchFunctionMode):
    """Tensors for the GPU stay on the host; with ``exact``, those for bf16 become fp32."""

    def __init__(self, exact: bool):
        super().__init__()
        self.exact = exact

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function is torch.Tensor.cuda:
            return args[0]
        if function is torch.Tensor.bfloat16 and self.exact:
            return args[0].float()
        kwargs = dict(kwargs or {})
        if "cuda" in str(kwargs.get("device", "")):
            kwargs["device"] = "cpu"
        for name in ("pin_memory", "non_blocking"):
            kwargs.pop(name, None)
        args = tuple("cpu" if isinstance(a, str) and a.startswith("cuda") else a for a in args)
        return function(*args, **kwargs)


class Abandoned(RuntimeError):
    """Another rank has failed."""


class World:
    """Where ranks leave what they send, collective after collective in the same order."""

    def __init__(self, size: int):
        self.size = size
        self._changed = threading.Condition()
        self._sent: dict[int, list[Any]] = {}
        self._next, self._taken = [0] * size, {}  # type: ignore[var-annotated]
        self._failed = False

    def send(self, rank: int, tensors: Sequence[Any]) -> int:
        """Leave copies of ``tensors`` and return the collective's number."""
        with self._changed:
            number = self._next[rank]
            self._next[rank] += 1
            self._sent.setdefault(number, [None] * self.size)[rank] = [
                t.detach().clone() for t in tensors
            ]
            self._changed.notify_all()
        return number

    def receive(self, number: int) -> list[list[Any]]:
        """Return what every rank has sent, once all have."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._failed or all(s is not None for s in self._sent[number])
            )
            if self._failed:
                raise Abandoned
            parts = self._sent[number]
            self._taken[number] = self._taken.get(number, 0) + 1
            if self._taken[number] == self.size:
                del self._sent[number], self._taken[number]
        return parts

    def fail(self) -> None:
        with self._changed:
            self._failed = True
            self._changed.notify_all()


class Work:
    """What an asynchronous collective returns; it is delivered when it is first waited for."""

    def __init__(self, deliver: Callable[[], Any] | None = None):
        self._deliver = deliver

    def wait(self) -> None:
        deliver, self._deliver = self._deliver, None
        if deliver:
            with torch.no_grad():
                deliver()

    def get_future(self) -> "Work":
        return self

    def value(self) -> None:
        return None

    def set_result(self, _: Any) -> None:
        return None

    def then(self, _: Any) -> "Work":
        return self


class Distributed:
    """``torch.distributed`` for one rank. What is sent is what a tensor holds when a collective is
    issued."""

    ReduceOp = SimpleNamespace(AVG="mean", SUM="sum", MAX="max")

    def __init__(self, world: World, rank: int):
        self._world, self._rank = world, rank
        self.is_initialized = self.is_available = lambda: True
        self.get_rank, self.get_world_size = lambda *_: rank, lambda *_: world.size
        self.init_process_group = self.destroy_process_group = lambda *_, **__: None

    def _issue(
        self, sent: Sequence[Any], deliver: Callable[[list[list[Any]]], Any], async_op: bool
    ) -> Work | None:
        number = self._world.send(self._rank, sent)
        work = Work(lambda: deliver(self._world.receive(number)))
        if async_op:
            return work
        work.wait()
        return None

    def barrier(self, *_: Any, **__: Any) -> None:
        self._issue([], lambda _: None, False)

    def broadcast(self, tensor: Any, src: int = 0, async_op: bool = False) -> Any:
        return self._issue([tensor], lambda parts: tensor.copy_(parts[src][0]), async_op)

    def all_reduce(self, tensor: Any, op: str = "sum", async_op: bool = False) -> Any:
        return self._issue(
            [tensor], lambda parts: tensor.copy_(_reduced([p[0] for p in parts], op)), async_op
        )

    def all_gather(self, outputs: Sequence[Any], tensor: Any, async_op: bool = False) -> Any:
        def deliver(parts: Any) -> None:
            for output, (part,) in zip(outputs, parts, strict=True):
                output.copy_(part)

        return self._issue([tensor], deliver, async_op)

    def all_gather_into_tensor(self, output: Any, tensor: Any, async_op: bool = False) -> Any:
        def deliver(parts: Any) -> None:
            output.copy_(torch.cat([part.reshape(-1) for (part,) in parts]).view(output.shape))

        return self._issue([tensor], deliver, async_op)

    def all_to_all_single(
        self,
        output: Any,
        tensor: Any,
        output_split_sizes: Sequence[int] | None = None,
        input_split_sizes: Sequence[int] | None = None,
        async_op: bool = False,
    ) -> Any:
        sent = torch.split(
            tensor, list(input_split_sizes or [len(tensor) // self._world.size] * self._world.size)
        )

        def deliver(parts: Any) -> None:
            output.copy_(torch.cat([part[self._rank] for part in parts]))

        return self._issue(sent, deliver, async_op)

    def reduce_scatter(
        self, output: Any, inputs: Sequence[Any], op: str = "sum", async_op: bool = False
    ) -> Any:
        def deliver(parts: Any) -> None:
            output.copy_(_reduced([part[self._rank] for part in parts], op))

        return self._issue(inputs, deliver, async_op)

    def reduce_scatter_tensor(
        self, output: Any, tensor: Any, op: str = "sum", async_op: bool = False
    ) -> Any:
        def deliver(parts: Any) -> None:
            mine = [part.reshape(self._world.size, -1)[self._rank] for (part,) in parts]
            output.copy_(_reduced(mine, op).view(output.shape))

        return self._issue([tensor], deliver, async_op)


def _reduced(parts: Sequence[Any], op: str) -> Any:
    if op == "max":
        return torch.stack(tuple(parts)).amax(0)
    total = torch.stack(tuple(parts)).sum(0)
    return total / len(parts) if op == "mean" else total


class Library:
    """``torch.library`` and ``torch.ops.nanogpt``: operators by their formulas, or by their own
    bodies."""

    def __init__(self, formulas: Mapping[str, Callable[..., Any]], exact: bool):
        self._formulas, self._exact = formulas, exact
        self.ops = SimpleNamespace(nanogpt=SimpleNamespace())

    def custom_op(self, name: str, **_: Any) -> Callable[[Any], Any]:
        name = name.split("::")[1]

        def register(body: Callable[..., Any]) -> Operator:
            operator = Operator(self._formulas.get(name, body) if self._exact else body)
            setattr(self.ops.nanogpt, name, operator)
            return operator

        return register


class Operator:
    """A custom operator, differentiated by the backward pass that the script registers."""

    def __init__(self, body: Callable[..., Any]):
        self.body, self._function = body, None

    def register_fake(self, function: Any) -> Any:
        return function

    def register_autograd(self, backward: Any, setup_context: Any) -> None:
        if self.body.__module__ != __name__:  # a formula is differentiated by torch
            methods = {"forward": self.body, "backward": backward, "setup_context": setup_context}
            members = {name: staticmethod(method) for name, method in methods.items()}
            self._function = type("Registered", (torch.autograd.Function,), members)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._function is None:
            return self.body(*args, **kwargs)
        return self._function.apply(*args, *kwargs.values())


def linear(x: Any, w: Any, **_: float) -> tuple[Any]:
    """The product that the FP8 head stands for."""
    return (x @ w.T,)


OPERATORS = {"mm": linear}


def scaled_mm(a: Any, b: Any, *, out_dtype: Any, scale_a: Any, scale_b: Any, **_: Any) -> Any:
    """``torch._scaled_mm``: the product of FP8 matrices times both scales, rounded once."""
    return (a.float() @ b.float() * scale_a * scale_b).to(out_dtype)


@dataclass
class BlockMask:
    """Which pairs of a query and a key attend, bool ``[T, T]``."""

    seen: Any

    @classmethod
    def from_kv_blocks(
        cls,
        num: Any,
        indices: Any,
        full_num: Any,
        full_indices: Any,
        BLOCK_SIZE: int,
        mask_mod: Any,
    ) -> "BlockMask":
        """Of the listed key blocks of each query block: all of the full ones, of the others what
        the mask says."""
        blocks = num.shape[-1]

        def listed(num: Any, indices: Any) -> Any:
            chosen = torch.zeros(blocks, blocks, dtype=torch.bool)
            for query, (count, keys) in enumerate(
                zip(num[0, 0].tolist(), indices[0, 0], strict=True)
            ):
                chosen[query, keys[: max(count, 0)].long()] = True
            return chosen.repeat_interleave(BLOCK_SIZE, 0).repeat_interleave(BLOCK_SIZE, 1)

        t = torch.arange(blocks * BLOCK_SIZE)
        part = listed(num, indices) & mask_mod(None, None, t[:, None], t[None])
        return cls(part | listed(full_num, full_indices))


def flex_attention(q: Any, k: Any, v: Any, *, block_mask: BlockMask, scale: float) -> Any:
    """Softmax attention ``[B, H, T, K]`` of the pairs in the mask."""
    scores = (q @ k.mT * scale).masked_fill(~block_mask.seen, -torch.inf)
    return torch.softmax(scores, dim=-1) @ v


def flash_attn_varlen_func(
    q: Any,
    k: Any,
    v: Any,
    *,
    cu_seqlens_q: Any,
    causal: bool,
    softmax_scale: float,
    window_size: Any,
    **_: Any,
) -> Any:
    """Softmax attention ``[T, H, K]`` within sequences that start at ``cu_seqlens_q``,
    ``window_size[0]`` keys back."""
    assert causal
    t = torch.arange(len(q))
    sequence = torch.searchsorted(cu_seqlens_q.long().unique(), t, right=True)
    back = t[:, None] - t[None]
    seen = (back >= 0) & (sequence[:, None] == sequence[None])
    if window_size[0] >= 0:
        seen &= back <= window_size[0]
    scores = torch.einsum("thk,shk->hts", q, k) * softmax_scale
    weights = torch.softmax(scores.masked_fill(~seen, -torch.inf), dim=-1)
    return torch.einsum("hts,shk->thk", weights, v)
