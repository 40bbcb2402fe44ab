"""What requests are like, and what processes cost. Rows of the capacity page."""

from __future__ import annotations

from tools.dashboards.panels import Panel, Query, Row
from tools.dashboards.promql import heat, mean, rate

# What the operating system says of a process has none of our labels; its build has them.
OF_PROCESS = "* on (instance) group_left (role) dspark_build_info"

REQUESTS = Row(
    title="What are requests like?",
    panels=(
        Panel(
            title="Prompt lengths",
            question="How long are prompts, in tokens?",
            queries=heat("dspark_request_prompt_tokens"),
            unit="short",
            kind="heatmap",
        ),
        Panel(
            title="Answer lengths",
            question="How long are answers, in tokens?",
            queries=heat("dspark_request_generation_tokens"),
            unit="short",
            kind="heatmap",
        ),
        Panel(
            title="Mean lengths",
            question="Do requests change, so that another mix of workers fits them?",
            queries=(
                Query(expr=mean("dspark_request_prompt_tokens"), legend="prompt"),
                Query(expr=mean("dspark_request_generation_tokens"), legend="answer"),
            ),
            unit="short",
        ),
    ),
)

PROCESSES = Row(
    title="What do processes cost, and how did they start?",
    panels=(
        Panel(
            title="Resident memory",
            question="How much memory of its host does each process take, and does it grow?",
            queries=(
                Query(
                    expr=f"process_resident_memory_bytes {OF_PROCESS}", legend="{{role}} {{pod}}"
                ),
            ),
            unit="bytes",
        ),
        Panel(
            title="Cores in use",
            question="How many cores does each process keep busy?",
            queries=(
                Query(
                    expr=f"rate(process_cpu_seconds_total[$__rate_interval]) {OF_PROCESS}",
                    legend="{{role}} {{pod}}",
                ),
            ),
            unit="short",
            decimals=2,
        ),
        Panel(
            title="Engine memory",
            question="What do engines keep memory for, all ranks together? host is a mesh's copy for hand-offs.",
            queries=(
                Query(
                    expr="sum by (role, kind) (dspark_device_memory_bytes)",
                    legend="{{role}} {{kind}}",
                ),
            ),
            unit="bytes",
            is_stacked=True,
        ),
        Panel(
            title="Start-up",
            question="What did each start spend its time on?",
            queries=(
                Query(
                    expr="max by (role, pod, phase) (dspark_startup_duration_seconds > 0)",
                    legend="{{role}} {{pod}} {{phase}}",
                ),
            ),
            unit="s",
            kind="bars",
            height=10,
        ),
        Panel(
            title="Loading weights",
            question="How far is a worker that loads, and how fast is its storage?",
            queries=(
                Query(
                    expr='min by (role, pod) (dspark_weight_load_progress_ratio{role!="router"})',
                    legend="{{role}} {{pod}} loaded",
                ),
            ),
            unit="percentunit",
            maximum=1,
            height=10,
        ),
        Panel(
            title="Versions",
            question="Which version does each process run? More than one outside a roll-out is a mistake.",
            queries=(Query(expr="max by (role, pod, version, python) (dspark_build_info)"),),
            unit="short",
            kind="table",
            height=10,
        ),
        Panel(
            title="Speed of loading",
            question="How many bytes of weights are read each second?",
            queries=(
                Query(
                    expr=rate('dspark_weight_load_bytes_total{role!="router"}', by="pod"),
                    legend="{{pod}}",
                ),
            ),
            unit="Bps",
        ),
        Panel(
            title="Settings",
            question="What is configured where, after defaults were filled in? The same role should say the same.",
            queries=(Query(expr="max by (role, pod, setting, value) (dspark_config_info)"),),
            unit="short",
            kind="table",
            width=16,
        ),
    ),
)
