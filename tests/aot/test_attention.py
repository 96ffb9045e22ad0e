"""What attention compiles to for an H100 that is not there.

Needs a CUDA plugin of jax, no driver: ``pip install 'jspeed[aot]'``. Nothing runs and cuDNN plans are not built, so
that what cuDNN refuses only then is not found here: tests/gpu is for that.
"""

import importlib.util
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.cudnn import fused_attention_stablehlo as fused
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jspeed.model.attention import attention, find_documents

# After openxla/xla xla/backends/gpu/target_config/specs/h100_sxm.txtpb; library versions as the wheels have them.
H100 = """
gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152 shared_memory_per_core: 233472
  threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 128
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: 3352320000000 l2_cache_size: 52428800 clock_rate_ghz: 1.98 device_memory_size: 84942979072
  shared_memory_per_block_optin: 232448
  cuda_compute_capability { major: 9 feature_extension: ACCELERATED_FEATURES }
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
  device_vendor: "NVIDIA Corporation" platform_version: "Compute Capability 9.0a" device_address_bits: 64
  pcie_bandwidth: 34359738368 ecc_enabled: true name: "NVIDIA H100 80GB HBM3" driver_version: "13.0.0"
  runtime_version: "12.9.0" compile_time_toolkit_version: "12.9.0" dnn_version: "9.10.0"
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 10 patch: 0 }
runtime_version { major: 12 minor: 9 patch: 0 }
device_description_str: "NVIDIA H100 80GB HBM3"
"""
BOS = 50_256
SHAPE = (4, 2048, 6, 128)


@pytest.fixture
def mesh(monkeypatch) -> Mesh:
    """Two H100 that are not there."""
    if not any(importlib.util.find_spec(name) for name in ("jax_cuda12_plugin", "jax_cuda13_plugin")):
        pytest.skip("no CUDA plugin is installed: pip install 'jspeed[aot]'")
    # jax asks the machine it runs on, not the one it compiles for.
    monkeypatch.setattr(fused, "check_compute_capability", lambda c: tuple(map(int, c.split("."))) <= (9, 0))
    monkeypatch.setattr(fused, "is_cuda_compute_capability_equal", lambda c: c == "9.0")
    monkeypatch.setenv("CUTE_DSL_ARCH", "sm_90a")
    topology = topologies.get_topology_desc(platform="cuda", target_config=H100, topology="1x1x2")
    return Mesh(np.array(topology.devices), ("data",), axis_types=(jax.sharding.AxisType.Explicit,))


def compiled(mesh: Mesh, backend: str, packed: bool, window: int | None) -> str:
    """The optimised program of all three gradients, lanes spread over the mesh."""

    def loss(q, k, v, tokens):
        documents = find_documents(tokens, BOS, 64) if packed else None
        out = attention(q, k, v, scale=0.12, documents=documents, window=window, backend=backend)
        return jnp.sum(out.astype(jnp.float32) ** 2)[None]

    rows = NamedSharding(mesh, P("data"))
    spread = jax.shard_map(loss, mesh=mesh, in_specs=P("data"), out_specs=P("data"), check_vma=backend != "fa4")
    x = jax.ShapeDtypeStruct(SHAPE, jnp.bfloat16, sharding=rows)
    tokens = jax.ShapeDtypeStruct(SHAPE[:2], jnp.uint16, sharding=rows)
    gradients = jax.jit(jax.grad(lambda *args: jnp.sum(spread(*args)), (0, 1, 2)))
    return gradients.trace(x, x, x, tokens).lower(lowering_platforms=("cuda",)).compile().as_text()


@pytest.mark.parametrize(("packed", "window"), [(False, None), (False, 256), (True, None), (True, 256)])
def test_cudnn(mesh, packed, window):
    text = compiled(mesh, "cudnn", packed, window)
    calls = [line for line in text.splitlines() if "custom-call(" in line and "__cudnn$fmha" in line]
    targets = sorted(re.search(r'custom_call_target="(.*?)"', line)[1] for line in calls)
    assert targets == ["__cudnn$fmhaSoftmax", "__cudnn$fmhaSoftmaxBackward"]
    for line in calls:
        config = json.loads(line.split("backend_config=")[1])["cudnn_fmha_backend_config"]
        assert config["mask_type"] == ("PADDING_CAUSAL" if packed else "CAUSAL")
        assert config["sliding_window_length"] == (window or 0)
        assert config["max_seg_per_batch"] == (64 if packed else 1)
        assert config["fmha_scale"] == pytest.approx(0.12)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # fa4-jax's use of cutlass
def test_fa4(mesh, monkeypatch):
    if importlib.util.find_spec("fa4_jax") is None:
        pytest.skip("fa4-jax is not installed (Python 3.12 or newer: pip install 'jspeed[fa4]')")
    fa4_kernels = pytest.importorskip("fa4_jax.kernels")
    monkeypatch.setattr(fa4_kernels, "_device_arch", lambda: 90)
    text = compiled(mesh, "fa4", packed=True, window=256)
    assert len([line for line in text.splitlines() if "custom-call(" in line]) >= 2
