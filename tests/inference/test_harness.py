"""The adapter for lm-eval against log-softmax of whole forward passes, and a task against our own
HellaSwag."""

import json
import sys
from dataclasses import replace
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspeed.corpus import tokenizers
from jspeed.inference import harness, score
from jspeed.inference.generate import Sampling, sample
from jspeed.inference.trained import Model
from jspeed.parallel.mesh import make_mesh
from jspeed.recipe import Context, init_parameters
from jspeed.run.find_recipe import find

from ..refusals import refused
from ..toys import TOYS

BYTES = tokenizers.bytes_tokenizer()


@pytest.fixture(scope="module")
def model():
    found, rng = find("stdlib", TOYS["stdlib"]), np.random.default_rng(0)
    shapes = jax.eval_shape(lambda: init_parameters(found.recipe.parameters, jax.random.key(0)))
    params = jax.tree.map(lambda s: jnp.asarray(rng.normal(0, 0.3, s.shape), s.dtype), shapes)
    return Model(found, params, make_mesh({"data": 1}, jax.devices()[:1]), BYTES.facts)


@pytest.fixture(scope="module")
def log_probabilities(model):
    """Of every id but the first, and the argmax there, from one forward pass over one row."""
    ctx = Context(replace(model.recipe.stages[-1], lane_len=17), training=False)
    forward = jax.jit(
        lambda row: jax.nn.log_softmax(model.recipe.forward(model.params, row[None], ctx)[0])
    )

    def of(ids):
        row = np.zeros(17, np.int32)
        row[: len(ids) - 1] = ids[:-1]
        log_p = np.asarray(forward(row))
        return log_p[np.arange(len(ids) - 1), ids[1:]], log_p[: len(ids) - 1, :257].argmax(-1)

    return of


def test_scores_are_those_of_whole_forward_passes(model, log_probabilities):
    """Unlike lengths in one batch, one too long for the model, and an ending that the model would
    itself give."""
    _, best = log_probabilities([256, *b"abx"])
    pairs = [
        ([256, *b"ab"], list(b"x")),
        (list(b"hello"), list(b" you")),
        ([256, *b"ab"], [int(best[2])]),
    ]
    pairs.append((list(b"0123456789abcdef"), list(b"xyz")))
    for (given, after), (total, _, likely) in zip(
        pairs, score.scorer(model, greedy=True)(pairs), strict=True
    ):
        ids = (given + after)[-17:]
        expected, best = log_probabilities(ids)
        assert total == pytest.approx(-float(expected[-len(after) :].sum()), abs=1e-4)
        assert likely == bool(np.all(best[-len(after) :] == ids[-len(after) :]))
    assert score.scorer(model, greedy=True)(pairs[2:3])[0].greedy


def test_without_lm_eval(model, monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    refused(r"lm-eval .*pip install 'jspeed\[eval\]'", harness.run_tasks, model, ["arc_easy"])


def test_what_lm_eval_asks_for(model, log_probabilities):
    pytest.importorskip("lm_eval", reason="the extra eval is not installed")
    ours = harness.harness(model)

    def asked(*arguments):
        return SimpleNamespace(args=arguments)

    assert ours.loglikelihood([asked("ab", " cd"), asked("", "cd")], disable_tqdm=True) == [
        (-found.loss, found.greedy)
        for found in score.scorer(model, greedy=True)(
            [(list(b"ab"), list(b" cd")), ([256], list(b"cd"))]
        )
    ]
    text = "a text that is longer than sixteen bytes"
    ids = [256, *text.encode()]
    first, _ = log_probabilities(ids[:17])
    assert ours.loglikelihood_rolling([asked(text[:16])]) == [
        pytest.approx(float(first.sum()), abs=1e-4)
    ]
    # lm-eval's windows: each of the model's length, the last one with as much before it as there is
    # room for.
    windows = [first, log_probabilities(ids[16:33])[0], log_probabilities(ids[24:41])[0][-8:]]
    expected = float(sum(window.sum() for window in windows))
    assert len(ids) == 41
    assert ours.loglikelihood_rolling([asked(text)])[0] == pytest.approx(expected, abs=1e-3)
    (written,) = sample(model, ["abc"], 6, Sampling(temperature=0))
    answer = written[len("abc") :]
    plain, cut = ours.generate_until(
        [
            asked("abc", {"until": [], "max_gen_toks": 6}),
            asked("abc", {"until": [answer[2]], "max_gen_toks": 6}),
        ]
    )
    assert plain == answer and cut == answer.partition(answer[2])[0]
    # Each as it was asked for, whoever is its neighbour.
    sampled = asked("abc", {"do_sample": True, "temperature": 5.0, "max_gen_toks": 6})
    short, wild, long = ours.generate_until(
        [asked("abc", {"max_gen_toks": 2}), sampled, asked("abc", {"max_gen_toks": 6})]
    )
    assert (short, long) == (answer[:2], answer) and wild != answer


@pytest.mark.slow  # lm-eval reads all its thousand tasks
def test_a_task_agrees_with_our_hellaswag(model, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    pytest.importorskip("lm_eval", reason="the extra eval is not installed")
    rng = np.random.default_rng(1)
    words = ["".join(chr(97 + n) for n in rng.integers(0, 26, 3)) for _ in range(60)]
    items = [{"ctx": words[n], "endings": words[n + 1 : n + 5], "label": n % 4} for n in range(24)]
    path = tmp_path / "items.jsonl"
    path.write_text("".join(json.dumps(item) + "\n" for item in items))
    task = dict(
        task="tiny", dataset_path="json", dataset_kwargs={"data_files": {"test": str(path)}}
    )
    task |= dict(
        test_split="test", output_type="multiple_choice", doc_to_text="ctx", doc_to_choice="endings"
    )
    task |= {"doc_to_target": "label", "metric_list": [{"metric": "acc"}]}
    found = harness.run_tasks(model, [task])
    *_, (done, right, _) = score.hellaswag(model, score.read_hellaswag(path))
    assert done == 24 and found["tiny"]["acc,none"] == pytest.approx(right / done)
    refused("no task 'arc_eazy' .*'arc_easy'", harness.run_tasks, model, ["arc_eazy"])
