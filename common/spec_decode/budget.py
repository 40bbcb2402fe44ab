"""How many drafts to verify, and whose. Knows survival probabilities and step costs; knows no request and no tensor.

A survival list holds, for one request, the probability that draft 1..j is accepted whole, for j = 1, 2, …; it never
rises. A width is the number of a request's drafts that are verified, always the first ones.

Choosing widths by survival is lossless as long as no choice looks at a draft that it admits: a survival sees only the
drafts before its own, but the *best* total number of rows is a function of all of them. So either the search stops at
the first row that does not pay (`widths_with_early_break`), or the total comes from confidences of an earlier step
(`row_budget`) and live ones only rank (`rank_by_survival`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from common.spec_decode.cost_table import CostTable

Survival = Sequence[Sequence[float]]
"""One list per request."""


def widths_with_early_break(
    survival: Survival, steps_per_second: Callable[[int], float]
) -> list[int]:
    """Algorithm 1 of the DSpark paper: admit the likeliest draft while expected tokens per second rise.

    `steps_per_second` takes a step's number of rows. The optimum where that gain has a single peak.
    """
    widths = [0] * len(survival)
    num_rows = len(survival)
    expected_tokens = float(num_rows)
    best = expected_tokens * steps_per_second(num_rows)
    for request, gain in _ranked(survival):
        num_rows += 1
        expected_tokens += gain
        throughput = expected_tokens * steps_per_second(num_rows)
        if throughput <= best:
            break
        best = throughput
        widths[request] += 1
    return widths


def row_budget(stale_survival: Survival, cost_table: CostTable, num_requests: int) -> int:
    """The number of drafts to verify that maximises expected tokens per second, the least of equals.

    `stale_survival` must be older than the drafts to be verified, or the choice is not lossless; a request that was
    not there yet counts as certain (ones). Each of `num_requests` has one row and one token without any draft.
    """
    gains = np.sort(np.concatenate([np.zeros(0), *map(np.asarray, stale_survival)]))[::-1]
    expected_tokens = num_requests + np.concatenate([[0.0], np.cumsum(gains)])
    num_rows = num_requests + np.arange(len(expected_tokens))
    return int(np.argmax(expected_tokens / cost_table.steps_s(num_rows)))


def rank_by_survival(live_survival: Survival, budget: int) -> list[int]:
    """Widths that admit the `budget` likeliest drafts, or all if there are fewer."""
    widths = [0] * len(live_survival)
    for request, _ in _ranked(live_survival)[:budget]:
        widths[request] += 1
    return widths


def _ranked(survival: Survival) -> list[tuple[int, float]]:
    """(request, survival) of all drafts, likeliest first; then the earlier draft, then the earlier request.

    Survival never rises along a request, so a draft is never ranked before the ones that it follows.
    """
    candidates = [
        (-value, position, request)
        for request, values in enumerate(survival)
        for position, value in enumerate(values)
    ]
    return [(request, -negated) for negated, _, request in sorted(candidates)]
