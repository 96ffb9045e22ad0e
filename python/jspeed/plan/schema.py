"""What ``jspeed plan --json`` writes: the keys, types and units of a plan (schema 3), of
``--bytes``, and of ``--evaluation``.

Sizes, FLOPs, kernels and times are of one device and one step unless a comment says otherwise.
"""

from typing import Annotated, Any, Literal, NotRequired, TypedDict

Kind = Literal[
    "fp8_matmul",
    "matmul",
    "attention_forward",
    "attention_backward",
    "fusion",
    "other",
    "collective",
]
# What the seconds of a plan are made of; each kernel counts to the one that bounds it.
Term = Literal[
    "FP8 matmuls",
    "bf16 matmuls",
    "other matmuls",
    "attention",
    "special functions",
    "passes over memory",
    "custom FP8 matmuls",
    "custom attention",
    "custom passes",
    "least kernels",
    "exposed communication",
    "idle between kernels",
    "empty blocks of attention",
    "table on the host",
]
Level = Literal["error", "warning", "note"]  # only errors count for --strict
# aliased: outputs in arguments' place
Allocation = Literal["arguments", "outputs", "aliased", "temporaries", "peak"]
Bound = Literal["compute", "memory"]
# rest: the optimizer and everything outside the gradient
Pass = Literal["forward", "backward", "rest"]
Bytes = Annotated[int, "bytes"]
FLOPs = Annotated[float, "FLOPs"]
Milliseconds = Annotated[float, "ms"]
Seconds = Annotated[float, "seconds"]
MillisecondRange = Annotated[list[Milliseconds], "low and high"]


class MicroBatch(TypedDict):
    """The micro-batch of a step; ``remat`` of a search row stands in its layout."""

    micro_batch_tokens: int  # of a device
    head_chunk: int | None  # tokens of a row that the head's loss takes at once; None: all
    # whether layers are recomputed for their gradients because memory is short
    remat: NotRequired[bool]


class BufferRow(TypedDict):
    """One array that an instruction writes."""

    bytes: Bytes
    dtype: str  # as HLO writes it
    dims: list[int]
    source: str  # file:line; empty if unknown
    op: str  # JAX's name of the operation, or HLO's


# Two rows have a keyword of Python as a key, which a class cannot have.
CollectiveRow = TypedDict(
    "CollectiveRow",
    {
        "kind": str,  # as HLO writes it: all-reduce, all-gather, ...
        "bytes": Bytes,  # of one run: the input of a reduce-scatter, the output of the others
        "axis": str,  # the mesh axis, or axes with a comma
        "group": int,  # devices
        "async": bool,
        "count": int,  # runs in a step
        "dtype": str,  # of its first array
        "ms": Milliseconds,  # of one run
        # of the kernels between its start and the first that waits for it
        "compute_ms_between": Milliseconds,
        "exposed_ms": Milliseconds,  # of one run
        "source": str,  # file:line; empty if unknown
    },
)


class HostRow(TypedDict):
    """Tables in the host's memory in a step (:func:`jspeed.plan.host.cost.exchange`)."""

    rows: int  # looked up
    bytes_each_way: Bytes  # over the links of all devices: rows, and their gradients
    asked_ms: Milliseconds  # of several hosts: finding which rows all ask for
    gather_ms: Milliseconds
    copied_ms: Milliseconds  # one way, over the link
    update_ms: Milliseconds  # by the gradients since the last update, where one is due
    exposed_ms: Milliseconds  # that no computing hides


class StagePlan(MicroBatch):
    """One stage, or one of a stage's programs."""

    name: str
    steps: int
    tokens_per_step: int  # of all devices
    micro_batches: int  # in a step
    compiled: bool  # False: it shares another program
    memory_bytes: dict[Allocation, Bytes]  # as the compiler allocates it
    memory_by_kind: dict[str, Bytes]  # the values sum to the peak
    # of the call of cuDNN that takes most, while it runs; part of the temporaries
    attention_workspace_bytes: Bytes
    largest_buffers: list[BufferRow]  # at most 10 that differ in shape or source
    flops: FLOPs
    flops_by_dtype: dict[str, FLOPs]
    flops_by_part: dict[str, FLOPs]  # of the model, most first
    model_flops: FLOPs  # that the model needs, by formula
    bytes_moved: float  # bytes read and written in device memory
    kernels: dict[str, int]  # runs by Kind; collectives are not among them
    collectives: list[CollectiveRow]  # in schedule order
    time_ms: dict[str, Milliseconds]  # jspeed.plan.predict.Times
    roofline_ms: Milliseconds  # compute, memory, exposed communication and launches
    # what is predicted: that, empty blocks, and what of a table on the host nothing hides
    expected_ms: Milliseconds
    host: HostRow | None  # where tables are there
    predicted_ms: MillisecondRange


class TermRow(TypedDict):
    """A term of the seconds of a run."""

    term: Term
    seconds: Seconds  # of all steps
    share: float  # of the run
    guessed: float  # share of the run that is this term's and that nobody has measured


class BottleneckRow(TypedDict):
    """Where the time of a run goes: the kernels of one source file, compute-bound and memory-bound
    ones apart."""

    source: str  # file, or "the compiler"
    bound: Bound
    seconds: Seconds  # of all steps
    share: float  # of all kernels


class HostMemory(TypedDict):
    """Tables in the host's memory, and that host."""

    cores: float
    memory_bytes: float
    link_bytes_per_second: float  # of a device, one direction
    table_bytes: Bytes  # with all rows in use
    share: float  # of the rows that the host has room for
    buffer_bytes: Bytes  # besides
    exposed: float  # share of the run's seconds


class Cost(TypedDict):
    """What a run on all devices costs."""

    currency: str
    per_device_hour: float
    low: float
    high: float


class MatmulRow(TypedDict):
    """The matmuls of one source line in the last stage's step."""

    source: str  # file:line
    name: str  # JAX's name of the operation
    dtype: str
    shape: list[int]  # of the largest: batch, rows, contracted, columns
    count: int  # runs on one device
    flops: FLOPs  # of all devices
    # FLOPs of all devices over those of one device alone; None if those are unknown
    redundancy: float | None


class CalibrationRow(TypedDict):
    """A published step time beside what is predicted of it (:func:`.predict.calibration`)."""

    recipe: str
    measured_ms: float
    predicted_ms: float
    error: float  # predicted / measured - 1
    source: str


class SearchRow(MicroBatch):
    """One layout and micro-batch that was tried with the last stage's step."""

    layout: str
    mesh: dict[str, int]
    peak_bytes: Bytes
    fits: bool
    predicted_ms: MillisecondRange | None  # None: the compiler refused the program


class Plan(TypedDict):
    """The plan of one recipe on one target."""

    schema: int
    recipe: str
    recipe_hash: str
    sets: list[str]  # NAME=VALUE, the fields that --set changed
    target: str
    device_kind: str  # as JAX calls it
    devices: int
    nodes: int
    mesh: dict[str, int]
    layout: str
    attention: str  # the backend
    compiled: bool
    programs: int  # compiled
    parameters: int
    device_memory_bytes: Bytes
    memory_limit_bytes: Bytes  # what JAX may take
    fits: bool
    fit: str  # what it needs, or what would fit
    facts: dict[str, Any]  # the fields of jspeed.plan.target.DataSheet, each with its source
    constants: list[dict[str, Any]]  # of the cost model: name, value, source
    calibration: list[CalibrationRow]
    stages: list[StagePlan]
    predicted_step_ms: MillisecondRange  # the mean over all steps
    predicted_seconds: list[Seconds]  # low and high, of the run
    expected_seconds: Seconds  # of the run
    terms: list[TermRow]  # largest first
    guessed: float  # share of the seconds that are guesses
    bottlenecks: list[BottleneckRow]  # largest first
    host: HostMemory | None  # where tables are there
    predicted_cost: Cost
    # version, and calls: words and :class:`.cudnn.ask.Answer`; None: not asked
    cudnn: dict[str, Any] | None
    findings: list[dict[str, Any]]  # :class:`jspeed.plan.findings.Finding`
    matmuls: list[MatmulRow]  # most FLOPs first
    warnings: list[str]
    bounds: list[str]
    guesses: list[str]
    search: NotRequired[list[SearchRow]]  # --search; best first
    against: NotRequired["Plan"]  # --against


LineRow = TypedDict(
    "LineRow",
    {
        # file:line of the kernel's last operation, which may be fused with others; or "the
        # compiler"
        "source": str,
        "pass": Pass,
        "kind": Kind,
        "kernels": int,  # runs
        "bytes": float,  # read and written
        "seconds": Seconds,  # of the roofline
    },
)


class Traffic(MicroBatch):
    """What ``--bytes`` prints and writes: the sums of the last stage's step, and its source
    lines."""

    recipe: str
    target: str
    kernels: int  # runs; collectives are not among them
    bytes: float  # read and written in device memory
    flops: FLOPs
    peak_bytes: Bytes
    roofline_ms: Milliseconds
    expected_ms: Milliseconds
    lines: list[LineRow]  # most bytes first


class EvaluationPlan(TypedDict):
    """What ``--evaluation`` prints and writes; pairs of seconds are without the blocks of attention
    that find nothing to do, and with those of documents as long as rows."""

    recipe: str
    target: str
    tokens: int  # that are scored
    peak_bytes: Bytes
    fits: bool
    seconds: list[Seconds]  # of one evaluation
    after_the_clock: int  # evaluations that a run makes after its clock has stopped
    seconds_after_the_clock: list[Seconds]
