"""Target look-up, and the error message without a compiler; compiling for them is tested in
tests/aot."""

import re
from pathlib import Path

import pytest
from jax._src.cudnn import fused_attention_stablehlo as cudnn

from jspeed.plan import target

from ..refusals import refused


@pytest.mark.parametrize(
    ("name", "capability", "kind"),
    [
        ("a100", (8, 0), "NVIDIA A100-SXM4-80GB"),
        ("a100-40", (8, 0), "NVIDIA A100-SXM4-40GB"),
        ("l4", (8, 9), "NVIDIA L4"),
        ("l40s", (8, 9), "NVIDIA L40S"),
        ("rtx3090", (8, 6), "NVIDIA GeForce RTX 3090"),
        ("rtx4090", (8, 9), "NVIDIA GeForce RTX 4090"),
        ("t4", (7, 5), "Tesla T4"),
        ("b200", (10, 0), "NVIDIA B200"),
        ("h100", (9, 0), "NVIDIA H100 80GB HBM3"),
        ("h200", (9, 0), "NVIDIA H200 141GB HBM3e"),
    ],
)
def test_targets(name: str, capability: tuple[int, int], kind: str):
    found = target.load_target(name)
    assert found.capability == capability
    assert found.device_kind == kind
    assert found.cudnn == 91002
    _, source, *rest = found.text.splitlines()
    assert source.startswith("# ") and ("openxla/xla" in source or "https://" in source)
    assert (
        sum(line.count("{") - line.count("}") for line in rest if not line.lstrip().startswith("#"))
        == 0
    )


@pytest.mark.parametrize(
    ("kind", "peak"),
    [
        ("NVIDIA A100-SXM4-40GB", 312e12),
        ("NVIDIA H100 80GB HBM3", 989.4e12),
        ("NVIDIA H200", 989.4e12),
    ]
    + [("NVIDIA B200", 2.25e15), ("NVIDIA L4", 121e12), ("NVIDIA H100 PCIe", None), ("cpu", None)],
)
def test_facts_by_the_name_that_jax_gives_a_device(kind: str, peak: float | None):
    """An H100 PCIe is no H100 SXM: it has 0.76 of the peak."""
    found = target.data_sheet_of(kind)
    assert (found and found.peak_flops["bf16"]) == (
        peak if peak is None else pytest.approx(peak, rel=1e-3)
    )


@pytest.mark.parametrize("path", sorted(target.TARGETS.glob("*.txtpb")), ids=lambda path: path.stem)
def test_facts_agree_with_the_compiler_s_target_config(path: Path):
    """Every fact has a source; size and bandwidth are the text's, to what vendors round."""
    facts, text = target.load_target(path.stem).data_sheet, path.read_text()
    assert set(facts.sources) == set(facts._fields) - {"per_node", "sources", "fractions"}
    assert set(facts.host) == {"cores", "memory_bytes", "link_bytes_per_second"}
    [size] = re.findall(r"device_memory_size: (\d+)", text)
    [bandwidth] = re.findall(r"memory_bandwidth: (\d+)", text)
    assert facts.hbm_bytes == int(size)
    assert facts.hbm_bytes_per_second == pytest.approx(int(bandwidth), rel=0.05)
    if target.load_target(path.stem).capability < (8, 0):  # neither bf16 nor tf32: fp32 instead
        assert facts.peak_flops == {"bf16": facts.peak_flops["f32"], "f32": facts.peak_flops["f32"]}
        return
    assert facts.peak_flops["bf16"] == pytest.approx(2 * facts.peak_flops["tf32"], rel=0.03)
    assert facts.peak_flops.get("f8", 2 * facts.peak_flops["bf16"]) == pytest.approx(
        2 * facts.peak_flops["bf16"], rel=0.02
    )


@pytest.mark.parametrize(
    ("text", "nodes", "per_node"),
    [
        ("h100x8", 1, 8),
        ("h200x1", 1, 1),
        ("h100x8x4", 4, 8),
        ("a100x4x2", 2, 4),
        ("h100x1024", 128, 8),
    ]
    + [
        ("rtx4090x1", 1, 1),
        ("rtx3090x2x2", 2, 2),
        ("a100-40x8", 1, 8),
        ("v5ex8", 1, 8),
        ("v6ex1", 1, 1),
    ],
)
def test_clusters(text: str, nodes: int, per_node: int):
    cluster = target.parse_target(text)
    assert (cluster.nodes, cluster.per_node, cluster.devices) == (nodes, per_node, nodes * per_node)


@pytest.mark.parametrize("name", ["v4", "v5e", "v5p", "v6e"])
def test_tpus(name: str):
    found = target.load_target(name)
    facts = found.data_sheet
    assert found.device_kind.startswith("TPU v") and found.capability == (0, 0)
    unsaid = {"per_node", "sources", "fractions", "host"}
    assert set(facts.sources) == set(facts._fields) - unsaid
    assert set(facts.peak_flops) == {"bf16"}
    for text in (f"{name}x3", f"{name}x8x2", f"{name}x1024"):
        refused(f"--target {text}: .* {name}x1, .* {name}x8", target.parse_target, text)


def test_without_libtpu_the_error_message_says_how_to_install_it(monkeypatch):
    monkeypatch.setattr(target, "installed", lambda module: False)
    assert re.search(
        r"install .* with pip install 'jax\[tpu\]==0.1[0-2].*'",
        str(target.missing(target.load_target("v5e"))),
    )
    refused("libtpu is not installed here", target.target_mesh, target.load_target("v5e"))


BAD = ["h100", "h100x", "h100x0", "h100x8x", "h100xeight", "h100x8x4x2", "x8"]
BAD += ["h100x²", "h100x" + "9" * 5000, "h100x8x9999999", "h100x80000000"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        *((text, "h100x8|known targets") for text in BAD),
        ("h100x12", "a node holds 8 h100 GPUs; write h100x8x2"),
        # as many as asked for, or more
        ("h100x16x2", "a node holds 8 h100 GPUs; write h100x8x4"),
    ],
    ids=lambda text: text[:20],
)
def test_bad_clusters_are_one_error_message(text: str, words: str):
    refused(words, target.parse_target, text)


def test_unknown_target_is_one_error_message():
    refused("did you mean 'h100'.*: a100, a100-40, b200, h100", target.load_target, "h10")


def test_pretend_answers_for_the_target_and_takes_it_back():
    before = (
        cudnn.check_compute_capability,
        cudnn.is_cuda_compute_capability_equal,
        cudnn.check_cudnn_version,
    )
    with pytest.raises(KeyError), target.pretend(target.load_target("h100")):
        assert cudnn.check_compute_capability("9.0")
        assert not cudnn.check_compute_capability("10.0")
        assert cudnn.is_cuda_compute_capability_equal("9.0")
        assert not cudnn.is_cuda_compute_capability_equal("10.3")
        assert cudnn.check_cudnn_version() == 91002
        raise KeyError
    after = (
        cudnn.check_compute_capability,
        cudnn.is_cuda_compute_capability_equal,
        cudnn.check_cudnn_version,
    )
    assert after == before


def test_without_plugin_the_reason_is_one_error_message(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(target, "PLUGINS", ("jax_plugins.none", "no_such_package.at_all"))
    assert re.search(r"pip install 'jspeed\[aot\]' or make test-aot.*223 MB", str(target.missing()))
    refused("no CUDA plugin", target.target_mesh, target.load_target("h100"))
