"""Some of our metrics under the names that vLLM gives them. Knows both names; counts nothing: values are read when asked for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from common.telemetry.metrics.families import Families
from common.types import FinishReason

ALIASES: Mapping[str, str] = {
    "vllm:num_requests_running": "dspark_running_requests",
    "vllm:num_requests_waiting": "dspark_queue_requests",
    "vllm:kv_cache_usage_perc": "dspark_kv_cache_usage_ratio",
    "vllm:time_to_first_token_seconds": "dspark_time_to_first_token_seconds",
    "vllm:inter_token_latency_seconds": "dspark_inter_token_latency_seconds",
    "vllm:request_time_per_output_token_seconds": "dspark_time_per_output_token_seconds",
    "vllm:e2e_request_latency_seconds": "dspark_request_duration_seconds",
    "vllm:prompt_tokens_total": "dspark_prompt_tokens_total",
    "vllm:generation_tokens_total": "dspark_generation_tokens_total",
    "vllm:request_prompt_tokens": "dspark_request_prompt_tokens",
    "vllm:request_generation_tokens": "dspark_request_generation_tokens",
    "vllm:request_success_total": "dspark_request_finished_total",
    "vllm:spec_decode_num_drafts_total": "dspark_spec_drafts_total",
    "vllm:spec_decode_num_draft_tokens_total": "dspark_spec_draft_tokens_total",
    "vllm:spec_decode_num_accepted_tokens_total": "dspark_spec_accepted_tokens_total",
    "vllm:spec_decode_num_accepted_tokens_per_pos_total": "dspark_spec_accepted_tokens_per_position_total",
}

_SUCCESSES = frozenset(reason.value for reason in FinishReason)


class VllmAliases(Collector):
    """What of one process's metrics vLLM has a name for."""

    def __init__(self, families: Families) -> None:
        self._sources = {
            alias: families.by_name[name]
            for alias, name in ALIASES.items()
            if name in families.by_name
        }

    def describe(self) -> Iterator[Metric]:
        """Names and types alone, for whoever asks for metrics by name."""
        for alias, source in self._sources.items():
            for metric in source.describe():
                yield Metric(alias.removesuffix("_total"), metric.documentation, metric.type)

    def collect(self) -> Iterator[Metric]:
        for alias, source in self._sources.items():
            for metric in source.collect():
                base = alias.removesuffix("_total")
                renamed = Metric(base, metric.documentation, metric.type)
                renamed.samples = [
                    sample._replace(
                        name=base + sample.name.removeprefix(metric.name), labels=_labels(sample)
                    )
                    for sample in metric.samples
                    if sample.labels.get("reason", "stop") in _SUCCESSES
                ]
                yield renamed


def _labels(sample: Sample) -> dict[str, str]:
    """vLLM's labels: other names, its engines numbered, draft positions counted from 0."""
    labels = {"model_name": sample.labels["model"], "engine": "0"}
    for name, value in sample.labels.items():
        match name:
            case "model" | "role":
                pass
            case "reason":
                labels["finished_reason"] = value
            case "position":
                labels["position"] = str(int(value) - 1)
            case _:
                labels[name] = value
    return labels
