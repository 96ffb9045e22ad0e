"""The fields of run.json.

Units are the same everywhere: losses are nats per token, times are seconds, sizes are bytes.
"""

import math
from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import Annotated, Any, Literal, NotRequired, TypedDict

from jspeed.fields import AtLeastOne, FolderName, FolderPath, NotNegative, Rule, Whole, version

SCHEMA = 2
MOST_SEED = 2**32 - 1  # --seed is a uint32


def _is_moment(value: str) -> bool:
    try:
        return datetime.fromisoformat(value).utcoffset() == timedelta(0)
    except ValueError:
        return False


Tokens = Annotated[Whole, "tokens"]
Seconds = Annotated[
    float,
    Rule("a finite number of at least 0 and at most 1e12", lambda v: 0 <= v <= 1e12),
    "seconds",
]
Loss = Annotated[float, "nats per token"]
LossOrNull = Annotated[float | None, "nats per token"]
Moment = Annotated[str, Rule("a UTC time such as 2026-01-31T12:00:00+00:00", _is_moment)]
Status = Literal["finished", "stopped", "interrupted", "diverged"]


class Devices(TypedDict):
    """What a run ran on."""

    kind: str  # as the device reports itself
    count: AtLeastOne  # of CPUs, those of the processes
    processes: AtLeastOne
    platform: str  # cpu, gpu or tpu


class Host(TypedDict):
    """Where the host spent its time."""

    data_wait_seconds: Seconds
    dispatch_seconds: Seconds


class Interval(TypedDict):
    """A line of the ledger."""

    name: str  # what it was spent on
    seconds: Seconds
    timed: bool  # whether it is on the training clock


class Validation(TypedDict):
    """A point of the curve."""

    step: Whole  # optimizer steps made before it
    timed_seconds: Seconds
    val_loss: LossOrNull  # null when not finite


class Probe(TypedDict):
    """A validity probe of the trained model; what it measured is beside the verdict."""

    passed: bool


class Versions(TypedDict):
    """Versions of Python and of the packages that computed the result."""

    python: str
    jax: str
    jaxlib: str
    numpy: str
    optax: str
    jspeed: str


class Git(TypedDict):
    """The code that ran."""

    commit: str | None  # null outside a git checkout
    dirty: bool | None  # tracked files differed from it


class Code(TypedDict):
    """The files that Python had loaded of jspeed when the run was set up."""

    modules: AtLeastOne
    sha256: str  # of the name and the SHA-256 of each
    extension: str  # SHA-256 of jspeed._dataloader


class Shard(TypedDict):
    """A shard that a run read from."""

    name: str
    sha256: str | None  # null if interrupted
    first: Tokens  # index of the first token that can have been read
    end: Tokens  # index after the last


class Data(TypedDict):
    """What a run trained and validated on."""

    name: str
    fingerprint: str  # hash of the training tokens' headers
    val_fingerprint: str
    train_tokens: Tokens  # in the training shards
    val_tokens: Tokens  # evaluated for val_loss
    tokenizer: str | None  # null for bytes
    val_sha256: str | None  # of the evaluated ids and the one after them, as uint16 or uint32
    # of the file of the first validation shard; null where it cannot be read, absent in older runs
    val_shard_sha256: NotRequired[str | None]
    train_shards: list[Shard]  # in order
    position: dict[str, Any]  # where the loader's stream stood at the end
    # whose standard library the text is, with its version; absent for other text
    python: NotRequired[str]


class Holdout(TypedDict):
    """The loss on a second range of the validation tokens, evaluated once, after the clock had
    stopped."""

    first: Tokens  # index of its first token
    tokens: Tokens
    sha256: str  # as data.val_sha256
    val_loss: LossOrNull  # null when not finite


class Unread(TypedDict):
    """The loss on training text that the run had not read, evaluated after the clock had
    stopped."""

    tokens: Tokens
    sha256: str  # as data.val_sha256
    val_loss: LossOrNull  # null when not finite


class CarriedArray(TypedDict):
    """A constant of a program."""

    program: str
    shape: list[Whole]
    dtype: str
    numbers: Whole  # that describe it


class Carried(TypedDict):
    """What the programs of a run held before its first step: nothing that somebody learned."""

    numbers: dict[str, Whole]  # in constants of the first state, the steps and the evaluation
    # of scalars, slices and joined arrays in the largest program; equal ones are not one
    places: NotRequired[dict[str, Whole]]
    arrays: list[CarriedArray]  # the larger constants
    calls: list[str]  # to the host, of any program


class Programs(TypedDict):
    """The executables of a run."""

    loaded: bool  # that an earlier run had saved; a preregistered run compiles its own
    sha256: dict[str, list[str]]  # of the optimised HLO of each, without places in the source


class Kernels(TypedDict):
    """What attention and FP8 matmuls ran on."""

    attention: str  # backend
    fp8: str  # native, emulated or missing
    # whether parts of the recipe ran in jspeed's custom kernels; older runs do not say
    own: NotRequired[bool]
    # of the last stage's program to kernels XLA did not make, by target
    calls: NotRequired[dict[str, AtLeastOne]]
    checked: list[str]  # preflight checks that passed; empty without a preflight
    refused: list[str]  # features found broken and not used, with reasons
    why: NotRequired[dict[str, str]]  # of each choice by its name; older runs do not say


class Announced(TypedDict):
    """Which of the runs that a plan.json announced a run is."""

    sha256: str  # the file's own hash
    folder: str


class Parameter(TypedDict):
    """A line of the recipe's table of parameters."""

    shape: list[Whole]  # without padding
    axes: list[str]
    reads: NotRequired[Whole]  # of a table: how many of its entries a token reads


Gpu = dict[str, float | str | None]
"""What nvidia-smi says of a GPU, by the names of :data:`jspeed.record.provenance.GPU_FACTS`."""


class Gpus(TypedDict):
    """The output of nvidia-smi on the machine of process 0."""

    driver: str
    cuda: str | None  # newest version of CUDA that the driver takes
    links: list[str]  # kinds of connection between the GPUs, as nvidia-smi topo calls them
    before: list[Gpu]  # each GPU before the clock started
    after: list[Gpu]  # each GPU after the clock stopped


class Identity(TypedDict):
    """Which recipe ran, with which fields and seed."""

    schema: Annotated[int, version(SCHEMA)]
    recipe: FolderName  # its records' folder
    recipe_hash: str  # of the recipe's resolved fields and source
    recipe_source: str  # name of its file
    fields: dict[str, Any]  # of the recipe, overrides applied
    overrides: dict[str, Any]  # the fields that --set changed
    parent: str | None  # recipe that this one was derived from
    track: FolderPath  # such as stdlib/cpu
    seed: int  # of the initial weights and of the data order


class Unsealed(Identity):
    """Fields of a run before it is hashed."""

    status: Status  # stopped: by --steps, --max-minutes or --stop-at-target
    reached: bool  # the final validation loss is at or below the target
    target_loss: Loss
    val_loss: LossOrNull  # null when not finite
    timed_seconds: Seconds  # on the training clock
    compile_seconds: Seconds  # beside the clock
    wall_seconds: Seconds  # from the command to the seal, imports included
    started: Moment
    steps: Whole  # optimizer steps made
    planned_steps: Whole  # of the recipe's whole schedule
    tokens: Tokens  # trained on
    parameters: Whole
    flops_per_token: Annotated[NotNegative, "FLOPs"]
    devices: Devices
    mesh: dict[str, AtLeastOne]
    layout: str
    micro_batch: Annotated[AtLeastOne, "tokens"]  # of one device
    loader: dict[str, Any]  # statistics of the data loader
    host: Host
    ledger: list[Interval]  # every interval of the run, in order
    curve: list[Validation]  # in order
    probes: dict[str, Probe]  # none where --steps cut short what nobody announced
    versions: Versions
    xla_flags: str  # XLA_FLAGS of the process; may be empty
    git: Git
    data: Data
    recipe_sha256: str  # of the recipe's file
    asked_steps: AtLeastOne | None  # that --steps asked for; null for the whole schedule
    ended: Moment
    resumed: list[Whole]  # steps after which the run was resumed
    plan: Announced | None
    initial_state: str  # checksum of parameters and optimizer state before step 1
    machine: str | None  # hash of the machine's boot id: equal for runs between two starts
    gpus: Gpus | None
    container: str | None  # JSPEED_CONTAINER, which a launcher sets to the image's digest
    environment: str  # SHA-256 of the names and versions of all installed packages
    # seconds by which the machine's clock was set during the run, or it slept; absent: none
    clock_stepped: NotRequired[float]
    holdout: NotRequired[Holdout]  # where the track asks for one and the shards hold it
    code: NotRequired[Code]  # older runs have none
    unread: NotRequired[Unread]  # where the run left enough of its training text unread
    weighted: NotRequired[bool]  # val_loss is a mean with weights of the recipe's
    # the class of the recipe's ``beside``; "": lanes are tokens alone; null: of a file of its own
    told_by: NotRequired[str | None]
    carried: NotRequired[Carried]  # of runs whose score the trainer computed; older ones have none
    programs: NotRequired[Programs]  # of what was compiled; older runs do not say
    kernels: NotRequired[Kernels]  # runs from before the preflight have none
    # tokens of a lane whose logits a step had at once; null, or none: all
    head_chunk: NotRequired[AtLeastOne | None]
    parameter_table: NotRequired[dict[str, Parameter]]  # by name; older runs have none
    active_parameters: NotRequired[Whole]  # that a token meets: count_parameters
    # whether layers were recomputed for their gradients because memory was short
    remat: NotRequired[bool]


class Run(Unsealed):
    """A run.json."""

    sha256: str  # of all other fields as canonical JSON


# axes of a table's entries, which a token, its position or a hash names
LOOKED_UP = ("token", "position", "row")


def count_parameters(table: Mapping[str, Parameter]) -> tuple[int, int]:
    """Return how many parameters a recipe's ``table`` has: in total, and active.

    *Total* are all that are trained and kept, padding left out. *Active* are those that one token
    meets in a forward pass. Of a table with an axis of LOOKED_UP only the entries count that a
    token reads: one by its id, one by its position, the rows that are fetched of a hashed table.
    Of everything else all count, the head included.
    """
    sizes = {name: math.prod(each["shape"]) for name, each in table.items()}
    active = 0
    for name, each in table.items():
        entries = math.prod(
            size
            for size, axis in zip(each["shape"], each["axes"], strict=True)
            if axis in LOOKED_UP
        )
        active += (
            sizes[name]
            if "reads" not in each
            else sizes[name] // max(entries, 1) * min(each["reads"], entries)
        )
    return sum(sizes.values()), active


EVERY_SHARD = "all"  # last element for a run that can have read all of its shards


def shards_of(run: Unsealed) -> tuple[str, ...] | None:
    """Return the SHA-256 sums of the training shards of ``run``, then EVERY_SHARD if it can have
    read all.

    None where hashes do not identify both validation and training data: interrupted runs, and those
    whose shards could not be read at the end.
    """
    data = run["data"]
    sums = [shard["sha256"] for shard in data["train_shards"] if shard["sha256"]]
    if not data["val_sha256"] or not sums or len(sums) < len(data["train_shards"]):
        return None
    position = data["position"]
    return *sums, *(
        [EVERY_SHARD] if position.get("epoch") or position.get("shuffle", "none") != "none" else []
    )
