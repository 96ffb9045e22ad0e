"""Compute-optimal numbers of tokens: Chinchilla's scaling laws (Hoffmann et al. 2022, arXiv 2203.15556).

They were measured on another text and tokenizer than FineWeb with GPT-2's, with learning rates that fall to a tenth
over the whole run, and with Adam. Losses are those of that text; ratios transfer better. Besiroglu et al. 2024
(arXiv 2404.10102) refit the third approach and find its published constants and their error bars doubtful.
"""

import math

from jspeed.errors import BadInput

TOKENS_PER_PARAMETER = 20  # on which the three approaches agree around 1e9 parameters (abstract, table 3)

# Approach 3, equation 10: L(N, D) = E + A / N^alpha + B / D^beta.
E, A, B, ALPHA, BETA = 1.69, 406.4, 410.7, 0.34, 0.28

# Approach 2, table A3: parameters and the tokens at which they are compute-optimal.
TABLE_A3 = (
    (400e6, 7.7e9),
    (1e9, 20.0e9),
    (10e9, 219.5e9),
    (67e9, 1.7e12),
    (175e9, 4.3e12),
    (280e9, 7.1e12),
    (520e9, 13.4e12),
    (1e12, 26.5e12),
    (10e12, 292.0e12),
)


def loss(parameters: float, tokens: float) -> float:
    """Predicted loss in nats per token of Chinchilla's own text: ``E + A / N^alpha + B / D^beta``."""
    return E + A / parameters**ALPHA + B / tokens**BETA


def best_for_flops(flops: float) -> tuple[float, float]:
    """Return (parameters, tokens) with the least :func:`loss` among all with ``6 N D = flops``.

    Equation 4: ``N = G (C / 6)^(beta / (alpha + beta))`` and ``D = (C / 6)^(alpha / (alpha + beta)) / G`` with
    ``G = (alpha A / (beta B))^(1 / (alpha + beta))``.
    """
    ratio = _ratio()
    return ratio * (flops / 6) ** (BETA / (ALPHA + BETA)), (flops / 6) ** (ALPHA / (ALPHA + BETA)) / ratio


def best_sizes(flops: float) -> list[str]:
    """Return lines that say the best size and tokens for ``flops`` of training (6 N D) by each approach.

    Raises BadInput for a number that is no amount of work.
    """
    if not 0 < flops < math.inf:
        raise BadInput(f"--flops {flops}: expected a number of FLOPs above 0, such as 2.21e19")
    size, tokens = best_for_flops(flops)
    slope, height = fit_approach_2()
    on_line = 10 ** ((math.log10(flops / 6) - height) / (1 + slope))
    simple = math.sqrt(flops / 6 / TOKENS_PER_PARAMETER)
    rows = {"approach 3": (size, tokens), "approach 2": (on_line, flops / 6 / on_line)}
    rows[f"{TOKENS_PER_PARAMETER} x N"] = simple, flops / 6 / simple
    return [
        f"{name:>10}: {n / 1e6:,.1f} M parameters, {d / 1e9:,.2f} B tokens, loss {loss(n, d):.3f} on Chinchilla's text"
        for name, (n, d) in rows.items()
    ]


def tokens_by_approach_3(parameters: float) -> float:
    """Tokens at which ``parameters`` are the best size by approach 3: :func:`best_for_flops` solved for C."""
    return best_for_flops(6 * (parameters / _ratio()) ** ((ALPHA + BETA) / BETA))[1]


def tokens_by_approach_2(parameters: float) -> float:
    """Tokens for ``parameters`` on the straight line, log against log, through table A3 (approach 2)."""
    slope, height = fit_approach_2()
    return 10 ** (slope * math.log10(parameters) + height)


def fit_approach_2() -> tuple[float, float]:
    """Return (slope, height at one parameter) of that line in powers of ten, by least squares."""
    points = [(math.log10(n), math.log10(d)) for n, d in TABLE_A3]
    x, y = (sum(values) / len(points) for values in zip(*points, strict=True))
    slope = sum((n - x) * (d - y) for n, d in points) / sum((n - x) ** 2 for n, _ in points)
    return slope, y - slope * x


def _ratio() -> float:
    return (ALPHA * A / (BETA * B)) ** (1 / (ALPHA + BETA))
