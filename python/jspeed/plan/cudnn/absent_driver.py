"""A CUDA driver and runtime for cuDNN on a machine without a GPU, compiled by ``cc``: enough to
build plans of kernels.

cuDNN looks functions up by name and wants each to be there; they say that all went well. The few
that return something say what the GPU is, or an address that is not null. Nothing can be allocated,
launched or measured.
"""

import re
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path
from string import Template
from typing import Any

DRIVER_VERSION = 13000  # CUDA 13.0
BUS_WIDTH = 5120  # bits, of an H100's memory
ATTRIBUTES = {  # numbers of cudaDeviceAttr, by what cuDNN calls them
    1: "maxThreadsPerBlock", 8: "maxSharedMemoryPerBlock", 10: "warpSize", 12: "regsPerBlock", 13:
    "smClockRateKHz",
    16: "multiProcessorCount", 36: "memClockRateKHz", 37: "memoryBusWidth", 38: "l2CacheSize", 39:
    "maxThreadsPerSM",
    82: "maxRegistersPerSM", 95: "supportCoopLaunch", 97: "maxSharedMemoryPerBlockOptin", 106:
    "maxCtasPerSM",
    111: "reservedSharedMemoryPerBlock",
}  # fmt: skip
NAMES = re.compile(rb"\0(cu[A-Z]\w+)(?=\0)")
# They return the address of something: a module, a kernel, a context.
MAKERS = re.compile(
    r"cu(Module(Load|GetFunction|GetGlobal)|Library(LoadData|Get)|KernelGetFunction"
    r"|CtxGetCurrent|CtxCreate"
    r"|DevicePrimaryCtxRetain|FuncGetModule)\w*"
)
DRIVER = Template("""\
#define _GNU_SOURCE
#include <dlfcn.h>
#include <string.h>
static char something[4096];
static int nothing(void) { return 0; }
$functions
int cuGetExportTable(void) { return 500; } /* not found */
int cuGetProcAddress_v2(const char *name, void **found, int version, unsigned long flags, int \
*status) {
  void *self = dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD);
  *found = strcmp(name, "cuGetProcAddress") ? dlsym(self, name) : (void *)cuGetProcAddress_v2;
  if (!*found) *found = (void *)nothing;
  if (status) *status = 0;
  return 0;
}
int cuGetProcAddress(const char *name, void **found, int version, unsigned long flags) {
  return cuGetProcAddress_v2(name, found, version, flags, 0);
}
""")
# cudaDeviceProp holds the name at 0 and the compute capability at 360 and 364.
RUNTIME = Template("""\
#include <string.h>
int cudaGetDevice(int *device) { *device = 0; return 0; }
int cudaGetDeviceCount(int *count) { *count = 1; return 0; }
int cudaDriverGetVersion(int *version) { *version = 13000; return 0; }
int cudaRuntimeGetVersion(int *version) { *version = 13000; return 0; }
int cudaGetDeviceProperties(char *found, int device) {
  memset(found, 0, 700); strcpy(found, "$name"); *(int *)(found + 360) = $major; *(int *)(found + \
364) = $minor;
  return 0;
}
int cudaGetDeviceProperties_v2(char *found, int device) { return cudaGetDeviceProperties(found, \
device); }
int cudaDeviceGetAttribute(int *value, int attribute, int device) {
  switch (attribute) { $attributes default: *value = 0; }
  return 0;
}
extern int cuGetProcAddress_v2(const char *, void **, int, unsigned long, int *);
int cudaGetDriverEntryPointByVersion(const char *name, void **found, unsigned version, unsigned \
long flags, int *ok) {
  return cuGetProcAddress_v2(name, found, version, flags, ok);
}
const char *cudaGetErrorString(int error) { return "no GPU"; }
int cudaGetLastError(void) { return 0; }
int cudaPeekAtLastError(void) { return 0; }
int cudaLibraryLoadData(void **found) { static char something[4096]; *found = something; return 0; }
int cudaLibraryGetKernel(void **found) { return cudaLibraryLoadData(found); }
int cudaDeviceSynchronize(void) { return 0; }
""")


def properties(
    numbers: Mapping[str, float], name: str, capability: tuple[int, int]
) -> dict[str, Any]:
    """What cuDNN calls the properties of a device, from the fields of a target's text (XLA's
    GpuTargetConfigProto).

    Resident blocks and the shared memory that CUDA reserves are those of Hopper, and no target says
    how wide the memory bus is: from clock and width follows the bandwidth alone.
    """
    major, minor = capability
    n = {key: int(value) for key, value in numbers.items()}
    return {
        "deviceName": name,
        "deviceVer": 100 * major + 10 * minor,
        "driverVer": DRIVER_VERSION,
        "cudaDeviceId": 0,
        "pciDeviceId": 0,
        "isTccDriver": 0,
        "supportCoopLaunch": 1,
        "smCountOrigin": 0,
        "multiProcessorCount": n["core_count"],
        "totalGlobalMem": n["device_memory_size"],
        "l2CacheSize": n["l2_cache_size"],
        "maxSharedMemoryPerBlock": n["shared_memory_per_block"],
        "maxSharedMemoryPerBlockOptin": n["shared_memory_per_block_optin"],
        "reservedSharedMemoryPerBlock": 1024,
        "oversizedSharedMemoryPerBlock": 0,
        "regsPerBlock": n["registers_per_block_limit"],
        "maxRegistersPerSM": n["registers_per_core_limit"],
        "warpSize": n["threads_per_warp"],
        "maxThreadsPerBlock": n["threads_per_block_limit"],
        "maxThreadsPerSM": n["threads_per_core_limit"],
        "maxCtasPerSM": 32,
        "smClockRateKHz": int(numbers["clock_rate_ghz"] * 1e6),
        "memClockRateKHz": n["memory_bandwidth"] * 8 // (2 * BUS_WIDTH) // 1000,
        "memoryBusWidth": BUS_WIDTH,
        "maxGridSize": [n[f"block_dim_limit_{axis}"] for axis in "xyz"],
        "maxBlockSize": [n[f"thread_dim_limit_{axis}"] for axis in "xyz"],
        "maxThreadsDim": [n[f"thread_dim_limit_{axis}"] for axis in "xyz"],
    }


def build(folder: Path, libraries: Iterable[Path], device: Mapping[str, Any]) -> None:
    """Write libcuda.so.1, with every name that ``libraries`` hold, and libcudart.so.13 into
    ``folder``.

    ``device`` is what :func:`properties` returns. Raises OSError without ``cc``, CalledProcessError
    where it fails.
    """
    major, minor = divmod(device["deviceVer"] // 10, 10)
    attributes = {number: device[name] for number, name in ATTRIBUTES.items()} | {
        75: major,
        76: minor,
    }
    for first, name in ((2, "maxBlockSize"), (5, "maxGridSize")):
        attributes |= dict(enumerate(device[name], first))
    names = {found.decode() for path in libraries for found in NAMES.findall(path.read_bytes())}
    own = {"cuGetExportTable", "cuGetProcAddress", "cuGetProcAddress_v2"}
    functions = "\n".join(
        f"int {one}(void **found) {{ *found = something; return 0; }}" if MAKERS.fullmatch(one)
        else f"int {one}(void) {{ return 0; }}"
        for one in sorted(names - own)
    )  # fmt: skip
    name = device["deviceName"]
    cases = " ".join(
        f"case {number}: *value = {value}; break;" for number, value in attributes.items()
    )
    folder.mkdir(parents=True, exist_ok=True)
    for library, source in (
        ("libcuda.so.1", DRIVER.substitute(functions=functions)),
        (
            "libcudart.so.13",
            RUNTIME.substitute(name=name, major=major, minor=minor, attributes=cases),
        ),
    ):
        words = [
            "cc",
            "-shared",
            "-fPIC",
            "-w",
            "-o",
            str(folder / library),
            "-x",
            "c",
            "-",
            "-x",
            "none",
        ]
        links = [str(folder / "libcuda.so.1")] if library != "libcuda.so.1" else []
        subprocess.run([*words, *links], input=source, text=True, check=True, capture_output=True)
