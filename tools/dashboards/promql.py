"""The few shapes that most queries have. Knows PromQL; no metric."""

from __future__ import annotations

from collections.abc import Sequence

from tools.dashboards.panels import Query

MEDIAN_AND_TAIL = (0.5, 0.95, 0.99)


def rate(series: str, *, by: str = "") -> str:
    """Change per second, added up over all else than `by`."""
    return f"sum{_by(by)}(rate({series}[$__rate_interval]))"


def occurring(counter: str, *, by: str) -> str:
    """Change per second of those that change at all; a line at zero when none does."""
    none = f'label_replace(vector(0), "{by}", "none", "", "")'
    return f"{rate(counter, by=by)} > 0 or on () {none}"


def per(part: str, whole: str, *, by: str = "") -> str:
    """How much of `part` there is for each one of `whole`, lately; `by` splits the part only."""
    if by:
        return f"{rate(part, by=by)} / on () group_left () ({rate(whole)} > 0)"
    return f"{rate(part)} / ({rate(whole)} > 0)"


def mean(histogram: str, matchers: str = "", *, by: str = "") -> str:
    """Mean of what was observed lately."""
    total, number = f"{histogram}_sum{matchers}", f"{histogram}_count{matchers}"
    return f"{rate(total, by=by)} / ({rate(number, by=by)} > 0)"


def quantiles(
    histogram: str, matchers: str = "", *, of: Sequence[float] = MEDIAN_AND_TAIL, by: str = ""
) -> tuple[Query, ...]:
    """One line for each quantile, and for each value of `by`."""
    who = f"{{{{{by}}}}} " if by else ""
    return tuple(
        Query(expr=quantile(histogram, matchers, q=q, by=by), legend=f"{who}p{q * 100:g}")
        for q in of
    )


def quantile(histogram: str, matchers: str = "", *, q: float, by: str = "") -> str:
    """What a share `q` of the observations stayed below, lately."""
    labels = f"{by}, le" if by else "le"
    return f"histogram_quantile({q:g}, {rate(f'{histogram}_bucket{matchers}', by=labels)})"


def heat(histogram: str, matchers: str = "") -> tuple[Query, ...]:
    """Observations by bucket, for a heat map."""
    return (
        Query(
            expr=f"sum by (le) (increase({histogram}_bucket{matchers}[$__rate_interval]))",
            legend="{{le}}",
        ),
    )


def _by(labels: str) -> str:
    return f" by ({labels}) " if labels else " "
