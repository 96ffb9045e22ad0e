"""``jspeed doctor``: host, devices, attention and FP8 kernels, caches, data, extras and launcher of
this machine."""

import contextlib
import json
import os
import platform
import shutil
import stat
import sys
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jspeed
from jspeed._dataloader import available_memory
from jspeed.base.cores import cores
from jspeed.base.files import PROGRAMS, cache_folder
from jspeed.base.numbers import size
from jspeed.base.standard_streams import without_logs
from jspeed.cli import repository
from jspeed.cli.flags import Command
from jspeed.cli.satellites import rank_of
from jspeed.data.manifest import complete_manifest
from jspeed.doctor import host
from jspeed.errors import BadInput

PACKAGES = ("jax", "jaxlib", "optax", "numpy", "orbax-checkpoint", "tiktoken")
# Of each extra: modules that show that it is there (any of them), and what it gives.
EXTRAS = {
    "cuda12": (("nvidia.cudnn",), "runs on NVIDIA GPUs (cuda13 with CUDA 13)"),
    "tpu": (("libtpu",), "runs on TPUs, plan compiles for them"),
    "aot": (("jax_plugins.xla_cuda12", "jax_plugins.xla_cuda13"), "plan compiles for absent GPUs"),
    "parquet": (("pyarrow",), "prepare reads .parquet and .zst"),
    "tokenizers": (("tokenizers",), "prepare text --tokenizer FILE.json"),
    "eval": (("lm_eval",), "evaluate --tasks NAME,..."),
    "log": (("tensorboard", "wandb"), "run --log tensorboard,wandb"),
}
SHARED = Path("/dev/shm")
NCCL_SHARED = 2**29  # bytes of it; Docker gives 64 MB, and NCCL's processes of a machine use it
LABEL = 15  # columns


def doctor(json_: bool = False) -> None:
    """Report what this machine can do: host, devices, kernels, caches, data, extras, launcher.

    Exit code: 0, whatever is found.

    Args:
        json_: Print it as JSON.
    """
    report = collect()
    print(json.dumps(report, indent=2) if json_ else as_text(report))


def collect() -> dict[str, Any]:
    """Return everything, as plain data; sizes are in bytes."""
    around = repository()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")  # of the machine
    devices = accelerators()
    from jspeed.record.provenance import installed, installed_version

    return {
        "jspeed": jspeed.__version__,
        "package": str(Path(jspeed.__file__).parent),
        "repository": str(around) if around else None,
        "python": platform.python_version(),
        "executable": sys.executable,
        "packages": {name: installed_version(name) for name in PACKAGES},
        "machine": {
            "cores": cores(),
            "memory": memory,
            "available_memory": available_memory(),
            "system": f"{platform.system()} {platform.machine()}",
            **host.facts(),
        },
        **devices,
        **cache_and_data(),
        "extras": {
            name: {"installed": any(map(installed, modules)), "gives": gives}
            for name, (modules, gives) in EXTRAS.items()
        },
        "launcher": launcher(os.environ),
        "shared_memory": shutil.disk_usage(SHARED).total if SHARED.is_dir() else None,
    }


def accelerators() -> dict[str, Any]:
    """Return the devices, and which kernels recipes get on them and why; or why JAX has none, or
    not the best."""
    with without_logs():
        import jax

        from jspeed.parallel.mesh import find_devices, make_mesh
        from jspeed.record import provenance
        from jspeed.run.compute.device import choices, device_of, platform_problem
    try:
        count = len(find_devices())
        kind = provenance.devices()["kind"]
        mesh = make_mesh()
        first = mesh.devices.flat[0]
        device = device_of(mesh, fields={"FP8": "on", "OWN_KERNELS": "on"})
    except (RuntimeError, BadInput) as error:
        return {
            "devices": None,
            "problem": str(error).splitlines()[0],
            "choices": {},
        }
    capability = getattr(first, "compute_capability", None) if device.platform == "gpu" else None
    return {
        "devices": {
            "platform": device.platform,
            "kind": kind,
            "count": count,
            "memory": device.memory,
            "compute_capability": capability and str(capability),
            "chosen_by": (
                f"JAX_PLATFORMS={asked}" if (asked := jax.config.values["jax_platforms"]) else None
            ),
        },
        "problem": platform_problem(device.platform),
        "choices": {choice.name: choice._asdict() for choice in choices(device)},
    }


def cache_and_data() -> dict[str, Any]:
    """Return where prepared data and compiled programs are kept, their sizes, the room there is,
    and the data sets."""
    try:
        folder = cache_folder()
    except BadInput as error:
        return {"cache": {"folder": None, "problem": str(error)}, "data": []}
    programs = Path(os.environ.get("JAX_COMPILATION_CACHE_DIR") or folder / "xla")
    there = next(place for place in (folder, *folder.absolute().parents) if place.exists())
    saved = folder / PROGRAMS
    sizes = {"data": folder_size(folder / "data"), "programs": folder_size(programs)}
    sizes["saved"] = folder_size(saved)
    places = {"folder": str(folder), "programs_folder": str(programs), "saved_folder": str(saved)}
    return {
        "cache": places | sizes | {"free": shutil.disk_usage(there).free},
        "data": data_sets(folder / "data"),
    }


def data_sets(folder: Path) -> list[dict[str, Any]]:
    """Return the folders of shards in the cache: tokenizer and tokens, or what is wrong with
    one."""
    listed = []
    for place in sorted(folder.iterdir() if folder.is_dir() else []):
        if place.name.startswith(".") or not place.is_dir():
            continue
        one: dict[str, Any] = {
            "name": place.name,
            "tokenizer": None,
            "tokens": None,
            "problem": None,
        }
        try:
            if manifest := complete_manifest(place):
                tokens = {split: total["tokens"] for split, total in manifest["splits"].items()}
                one |= {"tokenizer": manifest["tokenizer"], "tokens": tokens}
            else:
                one["problem"] = (
                    "no valid manifest.json or not all of its shards; run jspeed prepare again to"
                    " resume"
                )
        except BadInput as error:
            one["problem"] = str(error)
        listed.append(one)
    return listed


def launcher(environment: Mapping[str, str]) -> dict[str, Any]:
    """Return what started this process, as a run would find out, or why it could not."""
    try:
        rank = rank_of(environment)
    except BadInput as error:
        return {"processes": None, "problem": str(error)}
    return {
        "processes": rank.count if rank else 1,
        "process_id": rank.index if rank else 0,
        "problem": None,
    }


def shared_memory_problem(devices: Mapping[str, Any], shared: int | None) -> str | None:
    """Say what ``shared`` bytes are too little for, None where they are enough or nothing uses
    them."""
    if (
        devices["platform"] != "gpu"
        or devices["count"] == 1
        or shared is None
        or shared >= NCCL_SHARED
    ):
        return None
    return (
        f"/dev/shm has {size(shared)}, which can be too little for NCCL with a process for each"
        " GPU: start the container with --shm-size=1g, or let one process have all GPUs"
    )


def as_text(report: Mapping[str, Any]) -> str:
    """Return what was found as lines for a terminal."""
    rows = [*rows_of_machine(report), *rows_of_devices(report), *rows_of_data(report)]
    for number, (name, extra) in enumerate(report["extras"].items()):
        state = "installed" if extra["installed"] else f"pip install 'jspeed[{name}]'"
        rows.append(("" if number else "extras", f"{name}: {extra['gives']} - {state}"))
    launched = report["launcher"]
    alone = "none (single process)"
    several = f"process {launched.get('process_id')} of {launched['processes']}"
    rows.append(
        ("launcher", launched["problem"] or (alone if launched["processes"] == 1 else several))
    )
    width = max(60, min(110, shutil.get_terminal_size().columns))
    gap = " " * LABEL
    return "\n".join(
        textwrap.fill(
            text,
            width,
            initial_indent=f"{label:<{LABEL}}",
            subsequent_indent=gap,
            break_on_hyphens=False,
        )
        for label, text in rows
    )


def rows_of_machine(report: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return a label and a text for each line on jspeed, Python and the machine."""
    machine = report["machine"]
    packages = (f"{name} {number or 'missing'}" for name, number in report["packages"].items())
    left = machine["available_memory"]
    available = f", {size(left)} of it free" if left is not None else ""
    memory = f"{size(machine['memory'])} memory{available}"
    return [
        ("jspeed", f"{report['jspeed']} in {report['package']}"),
        ("repository", report["repository"] or "none (benches, records and tests need a checkout)"),
        ("Python", f"{report['python']} ({report['executable']})"),
        ("packages", ", ".join(packages)),
        ("machine", f"{machine['system']}, {machine['cores']} cores, {memory}"),
        *host.rows(machine),
    ]


def rows_of_devices(report: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Likewise on the devices, and what they run."""
    if not (devices := report["devices"]):
        return [("devices", report["problem"])]
    memory = f", {size(devices['memory'])} each for JAX" if devices["memory"] else ""
    chosen = f" ({devices['chosen_by']})" if devices["chosen_by"] else ""
    rows = [
        ("devices", f"{devices['count']} x {devices['kind']}{memory}{chosen}"),
        ("", report["problem"]),
        *((name, f"{one['value']}: {one['why']}") for name, one in report["choices"].items()),
        ("", shared_memory_problem(devices, report["shared_memory"])),
    ]
    return [(label, text) for label, text in rows if text]


def rows_of_data(report: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Likewise on what is kept on disk: data sets and programs."""
    sizes = report["cache"]
    if not sizes["folder"]:
        rows = [("cache", sizes["problem"])]
    else:
        rows = [
            ("cache", f"{sizes['folder']}: {size(sizes['data'])} data, {size(sizes['free'])} free"),
            ("", f"{sizes['programs_folder']}: {size(sizes['programs'])} compiled programs"),
            ("", f"{sizes['saved_folder']}: {size(sizes['saved'])} programs of whole runs"),
        ]
    for number, one in enumerate(report["data"]):
        tokens = ", ".join(f"{split} {count:,}" for split, count in (one["tokens"] or {}).items())
        text = one["problem"] or f"{tokens} tokens of {one['tokenizer']}"
        rows.append(("" if number else "data", f"{one['name']}: {text}"))
    if not report["data"]:
        none = "none prepared; jspeed run prepares stdlib itself, jspeed prepare --help has others"
        rows.append(("data", none))
    return rows


def folder_size(folder: Path) -> int:
    """Return the bytes of all files under a folder."""
    total = 0
    for path in folder.rglob("*"):
        # a run may replace a file of the cache meanwhile
        with contextlib.suppress(FileNotFoundError):
            status = path.stat()
            total += status.st_size if stat.S_ISREG(status.st_mode) else 0
    return total


COMMAND = Command(doctor, ("  # one screen", "--json  # for a program, or a bug report"))
