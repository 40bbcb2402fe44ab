"""Writes docs/metrics.md from the metrics' declarations. Knows both; counts nothing.

Run by `make metrics-page` and, with --check, by `make lint`.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from common.telemetry.metrics import RouterMetrics, WorkerMetrics
from common.telemetry.metrics.families import Family, Values
from common.telemetry.metrics.router import FIRST_TOKEN_STAGES, LATER_STAGES
from common.telemetry.metrics.vllm import ALIASES

PAGE = Path(__file__).resolve().parent.parent / "docs" / "metrics.md"

INTRODUCTION = """\
# Metrics

Written from `common/telemetry/metrics` by `make metrics-page`; change the declarations, not this page.

Every process serves its metrics at `http://<host>:<admin_port>/metrics`, as Prometheus text or as OpenMetrics, whichever
is asked for; `?name[]=dspark_running_requests` gives that family alone. Prefill and decode workers have the same families
with the same labels, so that one expression serves both; what only one of them does stays at 0 on the other.

Whatever can be counted is there from the start, at zero. Labels whose values are known beforehand list them here.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """Families of one kind of process."""

    title: str
    text: str
    families: tuple[Family, ...]


def main() -> int:
    """Write the page, or with --check only say whether the committed one is what the declarations give."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 on drift")
    is_current = PAGE.exists() and PAGE.read_text() == page()
    if parser.parse_args().check:
        if not is_current:
            print(f"docs/{PAGE.name} differs from the declarations; run `make metrics-page`")
        return 0 if is_current else 1
    PAGE.write_text(page())
    return 0


def page() -> str:
    """The whole page."""
    parts = [INTRODUCTION]
    for section in sections():
        parts.append(f"## {section.title}\n\n{section.text}\n")
        parts.append(_table(section.families))
        parts.append(_buckets(section.families))
        if section.title == "Router":
            parts.append(_stages())
    parts.append(_aliases(ALIASES))
    return "\n".join(part for part in parts if part)


def sections() -> Iterator[Section]:
    router = RouterMetrics(model="").families
    worker = WorkerMetrics(model="", role="").families
    both = {family.name for family in router} & {family.name for family in worker}
    yield Section(
        title="Every process",
        text="`role` is `router`, `prefill` or `decode`.",
        families=tuple(family for family in worker if family.name in both),
    )
    yield Section(
        title="Router",
        text=(
            "Where there is a `role`, it is that of the workers that are told of. `dspark_role_…` is what to scale "
            "workers by:\nthe figures of several routers add up, but for waiting time and capacity, of which the largest "
            "counts."
        ),
        families=tuple(family for family in router if family.name not in both),
    )
    yield Section(
        title="Prefill and decode workers",
        text="`role` is `prefill` or `decode`.",
        families=tuple(family for family in worker if family.name not in both),
    )


def _table(families: Iterable[Family]) -> str:
    lines = ["| name | type | labels | meaning |", "|---|---|---|---|"]
    for family in families:
        labels = "<br>".join(_label(name, values) for name, values in family.labels.items())
        lines.append(f"| `{family.name}` | {family.kind} | {labels} | {family.help} |")
    return "\n".join(lines) + "\n"


def _label(name: str, values: Values) -> str:
    return f"`{name}`" if values is None else f"`{name}`: {', '.join(values)}"


def _buckets(families: Iterable[Family]) -> str:
    by_buckets: dict[tuple[float, ...], list[str]] = {}
    for family in families:
        if family.buckets:
            by_buckets.setdefault(family.buckets, []).append(f"`{family.name}`")
    if not by_buckets:
        return ""
    lines = ["Buckets:", ""]
    for buckets, names in by_buckets.items():
        lines.append(f"* {', '.join(names)}: {', '.join(f'{bucket:g}' for bucket in buckets)}")
    return "\n".join(lines) + "\n"


def _stages() -> str:
    lines = [
        "A request is in one stage at any time. Those until the first token add up to the time to first token, all of them to",
        "the duration:",
        "",
        "| stage | what passes |",
        "|---|---|",
        *(f"| `{stage}` | {what} |" for stage, what in FIRST_TOKEN_STAGES.items()),
        "| | *first token* |",
        *(f"| `{stage}` | {what} |" for stage, what in LATER_STAGES.items()),
    ]
    return "\n".join(lines) + "\n"


def _aliases(aliases: Mapping[str, str]) -> str:
    lines = [
        "## Names of vLLM",
        "",
        "With `metrics_compat: vllm` each process also shows these, with the labels `model_name` and `engine`, so that",
        "dashboards and autoscalers that were made for vLLM go on working.",
        "",
        "| alias | stands for |",
        "|---|---|",
        *(f"| `{alias}` | `{name}` |" for alias, name in aliases.items()),
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    raise SystemExit(main())
