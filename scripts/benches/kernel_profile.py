"""Profile one call and sum the time of its GPU kernels by name."""

import tempfile
import warnings
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import jax
from jax.profiler import ProfileData, ProfileOptions

TOP = 15


@dataclass(frozen=True)
class Kernel:
    """One kernel on one device: ``ms`` sums its calls; ``share`` is of the time of all the device's
    kernels."""

    name: str
    calls: int
    ms: float
    share: float


@dataclass(frozen=True)
class Profile:
    """The longest kernels of one device. ``kernel_ms`` sums all of them; ``busy_ms`` counts
    overlaps once.

    ``by_operation`` has milliseconds by HLO instruction and, of each, by kernel. A CUDA graph hides
    instructions: its kernels belong to "", or to the graph's own.
    """

    device: str
    kernels: list[Kernel]
    distinct: int
    kernel_ms: float
    busy_ms: float
    by_operation: dict[str, dict[str, float]]


def profile(call: Callable[[], object]) -> Profile | str:
    """Profile ``call``, which returns only when the device is done; the reason where no GPU kernel
    was seen."""
    options = ProfileOptions()
    options.python_tracer_level = 0  # a line for each Python call would be most of the file
    with tempfile.TemporaryDirectory(prefix="jspeed-profile-") as folder:
        with jax.profiler.trace(folder, profiler_options=options):
            call()
        files = sorted(Path(folder).rglob("*.xplane.pb"))
        return (
            read(ProfileData.from_file(str(files[0])))
            if files
            else "no kernel table: the profiler wrote no file"
        )


def read(data: ProfileData) -> Profile | str:
    """Add up the kernels of the first GPU in a profile, copies included; or the reason why there
    are none."""
    planes = sorted(
        (plane for plane in data.planes if plane.name.startswith("/device:GPU:")),
        key=lambda p: p.name,
    )
    if not planes:
        return "no kernel table: the profile has no GPU in it"
    # Other lines of the plane repeat the same time by HLO operation, module or step.
    events = [
        event for line in planes[0].lines if line.name.startswith("Stream") for event in line.events
    ]
    if not events:
        return (
            "no kernel table: the profile has a GPU but no kernels; may this user read the GPU's"
            " counters (CUPTI)?"
        )
    calls: defaultdict[str, int] = defaultdict(int)
    spent: defaultdict[str, float] = defaultdict(float)
    by_operation: dict[str, dict[str, float]] = {}
    # JAX 0.12 on Python 3.13: its type of stats has no module; as an error it aborts
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        for event in events:
            calls[event.name] += 1
            spent[event.name] += event.duration_ns / 1e6
            operation = by_operation.setdefault(str(dict(event.stats).get("hlo_op", "")), {})
            operation[event.name] = operation.get(event.name, 0.0) + event.duration_ns / 1e6
    total = sum(spent.values())
    longest = sorted(spent, key=lambda name: -spent[name])[:TOP]
    rows = [
        Kernel(name, calls[name], spent[name], spent[name] / total if total else 0.0)
        for name in longest
    ]
    spans = [(event.start_ns, event.start_ns + event.duration_ns) for event in events]
    return Profile(
        planes[0].name.strip(), rows, len(spent), total, covered(spans) / 1e6, by_operation
    )


def covered(spans: list[tuple[float, float]]) -> float:
    """Length of the union of intervals (start, stop)."""
    length, reached = 0.0, float("-inf")
    for start, stop in sorted(spans):
        length += max(0.0, stop - max(start, reached))
        reached = max(reached, stop)
    return length
