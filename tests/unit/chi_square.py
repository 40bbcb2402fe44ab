"""Goodness of fit for the statistical tests. Seeds are fixed, so a test that passes once passes always."""

from __future__ import annotations

from scipy.stats import chi2
from torch import Tensor

FALSE_ALARM = 1e-6
"""Probability that a correct implementation fails one comparison, over the choice of the test's seeds."""

_MIN_EXPECTED = 5.0


def p_value(counts: Tensor, probabilities: Tensor) -> float:
    """Chance of counts [K] at least this far from probabilities [K]; rare cells are pooled, impossible ones must be empty."""
    counts, probabilities = counts.double().flatten(), probabilities.double().flatten()
    if bool((counts[probabilities == 0.0] > 0).any()):
        return 0.0
    expected = probabilities / probabilities.sum() * counts.sum()
    order = expected.argsort()
    expected, counts = expected[order], counts[order]
    num_pooled = int((expected.cumsum(0) < _MIN_EXPECTED).sum()) + 1
    expected[num_pooled - 1] = expected[:num_pooled].sum()
    counts[num_pooled - 1] = counts[:num_pooled].sum()
    expected, counts = expected[num_pooled - 1 :], counts[num_pooled - 1 :]
    statistic = float(((counts - expected) ** 2 / expected).sum())
    return float(chi2.sf(statistic, len(expected) - 1))
