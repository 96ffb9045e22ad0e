"""Targets by name, and what is said where no CUDA plugin is; compiling for them is tested in tests/aot."""

import pytest
from jax._src.cudnn import fused_attention_stablehlo as cudnn

from jspeed.errors import BadInput
from jspeed.plan import target


def test_h100():
    h100 = target.load_target("h100")
    assert h100.capability == (9, 0)
    assert h100.cudnn == 91002
    first, *rest = h100.text.splitlines()
    assert first.startswith("# ") and "openxla/xla" in first
    assert sum(line.count("{") - line.count("}") for line in rest if not line.lstrip().startswith("#")) == 0


def test_unknown_target_is_a_sentence():
    with pytest.raises(BadInput, match="did you mean 'h100'.*known targets: h100"):
        target.load_target("h10")


def test_pretend_answers_for_the_target_and_takes_it_back():
    before = (cudnn.check_compute_capability, cudnn.is_cuda_compute_capability_equal, cudnn.check_cudnn_version)
    with pytest.raises(KeyError), target.pretend(target.load_target("h100")):
        assert cudnn.check_compute_capability("9.0")
        assert not cudnn.check_compute_capability("10.0")
        assert cudnn.is_cuda_compute_capability_equal("9.0")
        assert not cudnn.is_cuda_compute_capability_equal("10.3")
        assert cudnn.check_cudnn_version() == 91002
        raise KeyError
    after = (cudnn.check_compute_capability, cudnn.is_cuda_compute_capability_equal, cudnn.check_cudnn_version)
    assert after == before


def test_without_plugin_the_reason_is_a_sentence(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(target, "PLUGINS", ("jax_plugins.none", "no_such_package.at_all"))
    assert "make test-aot" in str(target.missing())
    with pytest.raises(BadInput, match="no CUDA plugin"):
        target.target_mesh(target.load_target("h100"))
