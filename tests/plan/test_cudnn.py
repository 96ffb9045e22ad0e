"""The real cuDNN, asked without a GPU: whether it has plans for attention as recipes call it, and
their workspace."""

import json
import os
import shutil
from types import SimpleNamespace

import pytest

from jspeed.plan import findings
from jspeed.plan.attention import workspace_bytes
from jspeed.plan.cudnn import ask
from jspeed.plan.cudnn.ask import Answer, Answers, Call
from jspeed.plan.hlo import instructions
from jspeed.plan.target import known_targets, load_target

R29 = Call(True, 192, 6, 2048, 128, packed=True, causal=True, window=1409)
BACKWARD = [
    R29,
    R29._replace(window=641),
    R29._replace(documents=128, window=0),  # r62, r89
    R29._replace(documents=192, length=49152),  # r29 by lanes
    R29._replace(width=64),
    R29._replace(width=256),
    R29._replace(documents=9, heads=5, length=1000, width=72, window=100),
    Call(True, 8, 12, 1024, 64, packed=False, causal=True, window=0),  # llmc
]
needs_cudnn = pytest.mark.skipif(
    os.environ.get("JSPEED_TEST_CUDNN") != "1"
    or ask.wheels_folder() is None
    or shutil.which("cc") is None,
    reason="needs the real cuDNN and a C compiler: make test-cudnn",
)


@pytest.fixture(scope="module")
def asked() -> Answers:
    site = ask.wheels_folder()
    assert site
    return ask.ask(
        site, load_target("h100"), BACKWARD + [call._replace(backward=False) for call in BACKWARD]
    )


@needs_cudnn
def test_cudnn_has_a_plan_for_each_call(asked):
    assert tuple(map(int, asked.version.split("."))) >= (9, 19)
    assert all(
        answer.engine.startswith("eng") and not answer.refused for answer in asked.by_call.values()
    )


@needs_cudnn
@pytest.mark.parametrize(
    "call", BACKWARD, ids=lambda call: f"{call.documents}x{call.heads}x{call.length}x{call.width}"
)
def test_workspace_is_what_plans_count(asked, call):
    """To what cuDNN keeps besides: 75 kB for record 29."""
    counted = workspace_bytes((9, 0), call.documents, call.heads, call.length, call.width)
    little = 2**15 + 512 * call.documents
    assert 0 <= asked.by_call[call].workspace_bytes - counted <= little
    assert asked.by_call[call._replace(backward=False)].workspace_bytes <= little


@needs_cudnn
def test_what_cudnn_refuses_is_an_error_of_the_plan():
    site = ask.wheels_folder()
    assert site
    answers = ask.ask(site, load_target("h100"), [R29._replace(width=127), R29])
    [found] = findings.refused_by_cudnn(answers)
    assert found.level == "error" and "127" in found.text and not answers.by_call[R29].refused


@needs_cudnn
@pytest.mark.parametrize(
    "kind", sorted(k for k in known_targets() if load_target(k).capability >= (8, 0))
)
def test_other_gpus(kind):
    """Packed from Hopper on, as runs call it, else causal."""
    site, target = ask.wheels_folder(), load_target(kind)
    assert site
    call = R29 if target.capability >= (9, 0) else BACKWARD[-1]
    [answer] = ask.ask(site, target, [call]).by_call.values()
    counted = workspace_bytes(
        target.capability, call.documents, call.heads, call.length, call.width
    )
    assert answer.workspace_bytes == pytest.approx(counted, rel=1e-3), answer


def test_calls_are_asked_on_all_cores_and_answered_in_order(monkeypatch, tmp_path):
    shares = []

    def run(words, input, **_):
        _, *calls = map(json.loads, input.splitlines())
        shares.append(len(calls))
        said = [
            {"version": "9.28.1"},
            *({"engine": f"eng{call['window']}", "workspace": 1} for call in calls),
        ]
        return SimpleNamespace(stdout="\n".join(map(json.dumps, said)), stderr="", returncode=0)

    monkeypatch.setattr(ask, "cores", lambda: 2)
    monkeypatch.setattr(ask.subprocess, "run", run)
    (tmp_path / "driver" / "h100").mkdir(parents=True)
    (tmp_path / "driver" / "h100" / "libcudart.so.13").touch()
    calls = [R29._replace(window=window) for window in range(5)]
    answers = ask.ask(tmp_path, load_target("h100"), calls)
    assert sorted(shares) == [2, 3] and list(answers.by_call) == calls
    assert [answer.engine for answer in answers.by_call.values()] == [
        f"eng{window}" for window in range(5)
    ]


def test_a_refusal_names_the_call():
    answers = Answers(
        "9.28.1", {R29: Answer("", 0, "No valid engine"), R29._replace(window=0): Answer("eng6", 5)}
    )
    [found] = findings.refused_by_cudnn(answers)
    assert found.name == "cudnn-refuses" and found.level == "error"
    assert (
        found.text
        == "cuDNN 9.28.1 has no plan for backward, 192 documents of up to 2,048 tokens, 6 heads of"
        " 128, window 1409: No valid engine"
    )


def test_calls_are_read_from_the_program():
    """As XLA 0.10 writes them, with the workspace as the last result."""
    config = (
        '{"cudnn_fmha_backend_config":{"intermediate_tensor_shape":'
        '{"dimensions":["24","6","2048","2048"]},'
        '"mask_type":"PADDING_CAUSAL","sliding_window_length":1409,"max_seg_per_batch":8}}'
    )
    row, call = "bf16[24,6,2048,128]{3,1,2,0}", "__cudnn$fmhaSoftmaxBackward"
    text = f"""HloModule jit_step
ENTRY %main (p: bf16[24,6,2048,128]) -> (bf16[24,6,2048,128], bf16[24,6,2048,128], \
bf16[24,6,2048,128], u8[77]) {{
  %p = {row} parameter(0)
  %one = ({row}, {row}, {row}, u8[77]{{0}}) custom-call(%p), custom_call_target="{call}", \
backend_config={config}
  ROOT %two = ({row}, {row}, {row}, u8[77]{{0}}) custom-call(%p), custom_call_target="{call}", \
backend_config={config}
}}
"""
    assert ask.attention_calls([*instructions(text), *instructions(text)]) == [R29]
