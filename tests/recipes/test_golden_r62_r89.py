"""Small r62 and r89 against stored losses, gradients and updates of the original scripts."""

from typing import Any

import pytest

from .r62_r89_golden import measure

# Records 62 and 89, executed on a CPU in fp32 by tests/parity, which computes these anew: losses of
# lane 0 at tokens 0, 1, 23 and 47; norms of gradients of the sum over a lane in step 0; norms of
# what has changed after steps 0 and 2.
GOLDEN: dict[str, dict[str, Any]] = {
    "r62": {
        "losses": [7.436265, 7.6406507, 6.4475689, 7.0038652],
        "mean": 6.9600749,
        "sum over a lane, all targets": 574.54205,
        "gradients": {
            "attention": 16.68729,
            "attention_gates": 2.2584771,
            "attention_scales": 6.0405325,
            "backout_scale": 8.4812613,
            "bigram_scales": 2.9284852,
            "bigrams": 1.9925731,
            "layer_scales": 21.572197,
            "mlp": 178.40207,
            "skip_gate": 0.78292899,
            "skip_scale": 0.30490124,
            "smear_gate": 0.8133394,
            "smear_scale": 3.1243792,
            "start_scales": 6.3259672,
            "value_gates": 0.94895115,
            "values": 2.4504746,
            "words": 52.942134,
        },
        "first update": {"attention": 1.0163277, "mlp": 2.4413508},
        "three updates": {
            "attention": 2.632785,
            "attention_gates": 0.21466355,
            "attention_scales": 0.17888551,
            "backout_scale": 0.040000021,
            "bigram_scales": 0.13266499,
            "bigrams": 29.446542,
            "embed": 1.0870106,
            "head": 1.0870106,
            "layer_scales": 0.13266494,
            "mlp": 6.5571555,
            "skip_gate": 0.001385662,
            "skip_scale": 0.039999962,
            "smear_gate": 0.00027711794,
            "smear_scale": 0.039999992,
            "start_scales": 0.132665,
            "value_gates": 0.15179008,
            "values": 66.107357,
        },
    },
    "r89": {
        "losses": [8.3044062, 6.7791424, 5.7252254, 6.952611],
        "mean": 6.8090195,
        "sum over a lane, all targets": 623.44824,
        "gradients": {
            "attention_scales": 13.898634,
            "bigrams": 6.6820128,
            "gates_bias": 1.6189107,
            "gates_down": 12.000826,
            "gates_scale": 26.010939,
            "gates_up": 10.583956,
            "layer_scales": 19.129109,
            "mlp": 115.88808,
            "mudd_bias": 2.2746276,
            "mudd_down": 52.619204,
            "mudd_up": 40.790429,
            "post_scales": 11.059994,
            "queries_keys": 4.2320357,
            "skip_scale": 0.12909237,
            "smear_gate": 0.93987307,
            "smear_scale": 0.35016549,
            "value_gates": 0.44909794,
            "values": 1.4072006,
            "values_outs": 31.680869,
            "words": 46.106871,
        },
        "first update": {"mlp": 2.4414962, "queries_keys": 0.73031898, "values_outs": 0.71205826},
        "three updates": {
            "attention_scales": 0.17888552,
            "bigrams": 29.449157,
            "embed": 1.0870552,
            "gates_bias": 0.0065488592,
            "gates_down": 0.052386167,
            "gates_scale": 0.00079999864,
            "gates_up": 0.062706875,
            "head": 1.0870552,
            "layer_scales": 0.17435587,
            "mlp": 6.7637156,
            "mudd_bias": 0.0087175489,
            "mudd_down": 0.069742393,
            "mudd_up": 0.15676737,
            "post_scales": 0.034871249,
            "queries_keys": 2.0125653,
            "skip_scale": 0.039999962,
            "smear_gate": 0.00027711794,
            "smear_scale": 0.039999992,
            "value_gates": 0.13576519,
            "values": 85.342047,
            "values_outs": 1.9196843,
        },
    },
}


def same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """Assert that two summaries agree to what fp32 leaves of them."""
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        # The gradient of one scale is a sum of thousands of numbers that cancel.
        assert found[key] == pytest.approx(value, rel=1e-4 if isinstance(value, dict) else 1e-5), (
            key
        )


@pytest.mark.slow
@pytest.mark.parametrize("name", GOLDEN)
def test_recipes_give_the_numbers_of_the_records(name):
    same(measure(name), GOLDEN[name])
