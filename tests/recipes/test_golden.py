"""Small r21, r29, track3 against losses, gradients and updates of the original scripts."""

import json
import pprint
from typing import Any

import pytest

from .golden import measure

# Printed by make test-parity MODDED=CLONE ARGS='-k golden -s --print-golden', which executes the
# scripts themselves: r21 in the log of modded-nanogpt's records/track_1_short/2025-01-26_BatchSize,
# r29 in 2025-09-03_FA3, track3 in records/track_3_optimization/results/20260610_tuned_baseline_3250
# (tests/parity/cases.py says which file). Losses are of four tokens, gradients and updates norms;
# golden.py draws parameters and tokens.
GOLDEN: dict[str, dict[str, Any]] = {
    "r21": {
        "losses": [4.179552, 4.157365, 8.87867, 6.082826],
        "mean": 7.539207,
        "gradients": {
            "attention": 0.6237927,
            "block_scales": 0.3769867,
            "embed": 0.2751269,
            "head": 0.7384264,
            "mlp": 3.344354,
            "skip_scales": 0.07408404,
            "value_scales": 0.09672025,
            "values": 0.04316201,
        },
        "first update": {
            "attention": 2.065178,
            "block_scales": 0.1959592,
            "embed": 35.99999,
            "head": 1.086114,
            "mlp": 2.417436,
            "skip_scales": 0.09797959,
            "value_scales": 0.1649243,
            "values": 62.35351,
        },
        "three updates": {
            "attention": 5.19917,
            "block_scales": 0.3888353,
            "embed": 71.56213,
            "head": 2.57802,
            "mlp": 6.388355,
            "skip_scales": 0.1957511,
            "value_scales": 0.328888,
            "values": 128.8434,
        },
    },
    "r29": {
        "losses": [4.961512, 7.204199, 8.42836, 8.41876],
        "mean": 7.903155,
        "gradients": {
            "attention": 0.4423229,
            "block_scales": 0.4919131,
            "embed": 0.3054582,
            "gate": 0.05829326,
            "head": 0.7442367,
            "mlp": 3.623818,
            "skip_scales": 0.163227,
            "value_scales": 0.07694569,
            "values": 0.03567193,
        },
        "first update": {
            "attention": 2.048306,
            "block_scales": 0.1959592,
            "embed": 36.00001,
            "gate": 0.3802648,
            "head": 1.086116,
            "mlp": 1.521256,
            "skip_scales": 0.09797963,
            "value_scales": 0.1649243,
            "values": 62.35379,
        },
        "three updates": {
            "attention": 5.087078,
            "block_scales": 0.2941157,
            "embed": 71.30344,
            "gate": 0.9632892,
            "head": 2.645655,
            "mlp": 3.960587,
            "skip_scales": 0.2067349,
            "value_scales": 0.3493492,
            "values": 127.1378,
        },
    },
    "track3": {
        "losses": [7.541722, 5.407035, 5.198103, 5.631577],
        "mean": 6.77069,
        "gradients": {
            "attention": 0.311801,
            "attention_bias": 0.06906286,
            "attention_gain": 0.03262572,
            "down_bias": 0.03771169,
            "embed": 0.01201903,
            "embed_gain": 0.01482098,
            "final_gain": 0.472001,
            "head": 0.5022659,
            "head_bias": 0.1049432,
            "mlp": 0.8443783,
            "mlp_gain": 0.1223203,
            "up_bias": 0.12634,
        },
        "first update": {
            "attention": 1.084794,
            "attention_bias": 0.7199974,
            "attention_gain": 0.3599963,
            "down_bias": 0.3600004,
            "embed": 67.89648,
            "embed_gain": 0.1039179,
            "final_gain": 0.1039631,
            "head": 0.5430629,
            "head_bias": 0.2939693,
            "mlp": 1.329547,
            "mlp_gain": 0.3600011,
            "up_bias": 0.7041949,
        },
        "three updates": {
            "attention": 2.694163,
            "attention_bias": 1.505799,
            "attention_gain": 0.7653213,
            "down_bias": 0.7569246,
            "embed": 145.6393,
            "embed_gain": 0.2218835,
            "final_gain": 0.225056,
            "head": 1.462287,
            "head_bias": 0.8338922,
            "mlp": 3.385426,
            "mlp_gain": 0.7627055,
            "up_bias": 1.497907,
        },
    },
}


def paste(name: str, found: dict[str, Any]) -> str:
    """Return an entry of GOLDEN as text, to seven digits."""
    rounded = json.loads(json.dumps(found), parse_float=lambda text: float(f"{float(text):.7g}"))
    return f'"{name}": ' + pprint.pformat(rounded, width=110, compact=True, sort_dicts=False) + ","


def same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """Assert that two summaries agree to what fp32 leaves of them."""
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        assert found[key] == pytest.approx(value, rel=2e-5), key


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=pytest.mark.slow) if n in ("r21", "track3") else n for n in GOLDEN],
)
def test_recipes_give_the_numbers_of_the_records(name):
    same(measure(name), GOLDEN[name])
