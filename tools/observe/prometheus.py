"""A real Prometheus on this machine and what it answers. Knows its command line and its HTTP interface."""

from __future__ import annotations

import contextlib
import json
import math
import shutil
import subprocess
import tempfile
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from services.cli.ports import free_ports

START_S = 60.0
STOP_S = 30.0
ANSWER_S = 30.0
POLL_S = 0.1

Labels = Mapping[str, str]


class QueryRefused(Exception):
    """Prometheus does not accept an expression; the message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A process to scrape, with the labels that a cluster's discovery would add."""

    address: str
    labels: Labels


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """One series of an instant query's answer."""

    labels: Labels
    value: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedRule:
    """A rule as Prometheus has it, with how its last evaluation went."""

    name: str
    expr: str
    is_alert: bool
    health: str
    """ok, err or unknown."""
    error: str
    state: str
    """An alert's: inactive, pending or firing."""


class Prometheus:
    """One running server."""

    def __init__(self, url: str) -> None:
        self.url = url

    def query(self, expr: str) -> tuple[Series, ...]:
        """What an expression is now; a scalar is one series without labels. Raises QueryRefused."""
        answer = self._get("query", query=expr)
        if answer["resultType"] == "scalar":
            return (Series(labels={}, value=float(answer["result"][1])),)
        return tuple(
            Series(labels=one["metric"], value=float(one["value"][1])) for one in answer["result"]
        )

    def has_figures(self, expr: str) -> bool:
        """Whether an expression gives at least one number: NaN, which is 0/0, is none."""
        return any(not math.isnan(series.value) for series in self.query(expr))

    def rules(self) -> tuple[LoadedRule, ...]:
        """All rules of all groups."""
        return tuple(
            LoadedRule(
                name=rule["name"],
                expr=rule["query"],
                is_alert=rule["type"] == "alerting",
                health=rule["health"],
                error=rule.get("lastError", ""),
                state=rule.get("state", ""),
            )
            for group in self._get("rules")["groups"]
            for rule in group["rules"]
        )

    def _get(self, what: str, **parameters: str) -> Any:
        url = f"{self.url}/api/v1/{what}?{urllib.parse.urlencode(parameters)}"
        try:
            with urllib.request.urlopen(url, timeout=ANSWER_S) as answer:
                return json.load(answer)["data"]
        except urllib.error.HTTPError as error:
            with error:
                raise QueryRefused(json.load(error)["error"]) from None


def missing_tools() -> list[str]:
    """Which of Prometheus's programs this machine lacks."""
    return [name for name in ("prometheus", "promtool") if shutil.which(name) is None]


@contextlib.contextmanager
def running_prometheus(
    targets: Sequence[Target] = (), rules: Sequence[Path] = (), *, interval_s: float = 1.0
) -> Iterator[Prometheus]:
    """A server that scrapes and evaluates every `interval_s`, on a free port and with nothing kept when it ends."""
    (port,) = free_ports("127.0.0.1", 1)
    with tempfile.TemporaryDirectory(prefix="dspark-prometheus-") as folder:
        config = Path(folder) / "prometheus.yml"
        config.write_text(yaml.safe_dump(_config(targets, rules, interval_s)))
        log = Path(folder) / "log"
        command = [
            "prometheus",
            f"--config.file={config}",
            f"--storage.tsdb.path={folder}/data",
            f"--web.listen-address=127.0.0.1:{port}",
            "--log.level=warn",
        ]
        with log.open("wb") as output:
            process = subprocess.Popen(command, stdout=output, stderr=output)
        try:
            server = Prometheus(f"http://127.0.0.1:{port}")
            _wait_ready(server, process, log)
            yield server
        finally:
            process.terminate()
            try:
                process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(STOP_S)


def _config(
    targets: Sequence[Target], rules: Sequence[Path], interval_s: float
) -> dict[str, object]:
    every = f"{round(interval_s * 1000)}ms"
    return {
        "global": {
            "scrape_interval": every,
            "scrape_timeout": every,
            "evaluation_interval": every,
        },
        "rule_files": [str(path) for path in rules],
        "scrape_configs": [
            {
                "job_name": "dspark",
                "static_configs": [
                    {"targets": [target.address], "labels": dict(target.labels)}
                    for target in targets
                ],
            }
        ],
    }


def _wait_ready(server: Prometheus, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise RuntimeError(f"prometheus ended at once: {log.read_text()[-2000:]}")
        with (
            contextlib.suppress(OSError),
            urllib.request.urlopen(f"{server.url}/-/ready", timeout=ANSWER_S),
        ):
            return
        time.sleep(POLL_S)
    raise TimeoutError(f"prometheus was not ready after {START_S:.0f} s")
