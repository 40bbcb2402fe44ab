"""Writes tests/golden/chart: what the chart renders for every example. Knows helm; judges nothing.

Run by `make chart`; a test compares. Rules and dashboards are left out: they are files of their own in the chart.
"""

from __future__ import annotations

import re
from pathlib import Path

from tests.support.chart import EXAMPLES, rendered_text

GOLDEN = Path(__file__).resolve().parent.parent / "tests" / "golden" / "chart"

_ELSEWHERE = re.compile(r"kind: PrometheusRule$|^  name: \S+-dashboard-", re.MULTILINE)


def main() -> int:
    """Write all files anew."""
    GOLDEN.mkdir(parents=True, exist_ok=True)
    for old in GOLDEN.glob("*.yaml"):
        old.unlink()
    for example in ("", *EXAMPLES):
        golden_path(example).write_text(golden_text(example))
    return 0


def golden_path(example: str) -> Path:
    return GOLDEN / f"{example or 'empty'}.yaml"


def golden_text(example: str) -> str:
    """What helm renders, without what has files of its own."""
    parts = rendered_text(example).split("---\n")
    return "---\n".join(part for part in parts if not _ELSEWHERE.search(part))


if __name__ == "__main__":
    raise SystemExit(main())
