"""The chart as the real helm renders it, and what of it tests look at. Knows YAML; no cluster."""

from __future__ import annotations

import functools
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

CHART = Path(__file__).parents[2] / "helm" / "dspark"
EXAMPLES = {
    path.stem.removeprefix("values-"): path for path in sorted(CHART.glob("examples/*.yaml"))
}
HELM = shutil.which("helm", path=str(Path(sys.executable).parent)) or shutil.which("helm")
RELEASE = "demo"
NAMESPACE = "serving"
NEWEST = "1.35.0"

requires_helm = pytest.mark.skipif(
    HELM is None, reason="helm is not installed; `make install` gets it where it can be had"
)

Manifest = dict[str, Any]


class Refused(Exception):
    """Helm would not render, and said why."""


def helm(*arguments: str, values: Mapping[str, Any] | None = None) -> str:
    """Output of a helm command, with `values` as one more values file. Raises Refused."""
    assert HELM is not None, "the test lacks requires_helm"
    given = ("--values", "-") if values is not None else ()
    done = subprocess.run(
        [HELM, *arguments, *given],
        input=json.dumps(values) if values is not None else None,
        capture_output=True,
        text=True,
        timeout=120,
    )
    if done.returncode:
        raise Refused(done.stderr + done.stdout)
    return done.stdout


def rendered_text(
    example: str = "", *, values: Mapping[str, Any] | None = None, version: str = NEWEST
) -> str:
    """All manifests of an example, or of an empty install, with `values` on top."""
    chosen = ("--values", str(EXAMPLES[example])) if example else ()
    place = ("--namespace", NAMESPACE, "--kube-version", version)
    return helm("template", RELEASE, str(CHART), *place, *chosen, values=values)


def rendered(
    example: str = "", *, values: Mapping[str, Any] | None = None, version: str = NEWEST
) -> list[Manifest]:
    return manifests(rendered_text(example, values=values, version=version))


def notes(values: Mapping[str, Any]) -> str:
    """What helm says after an install."""
    place = ("--namespace", NAMESPACE, "--dry-run=client")
    return helm("install", RELEASE, str(CHART), *place, values=values).partition("NOTES:")[2]


@functools.cache
def rendered_example(example: str) -> list[Manifest]:
    """Of an example or, when empty, of an empty install; shared by tests, which do not change it."""
    return rendered(example)


def manifests(text: str) -> list[Manifest]:
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    return [manifest for manifest in yaml.load_all(text, Loader=loader) if manifest]


def of_kind(found: list[Manifest], *kinds: str) -> list[Manifest]:
    return [manifest for manifest in found if manifest["kind"] in kinds]


def named(found: list[Manifest], kind: str, suffix: str = "") -> Manifest:
    """The one manifest of a kind whose name ends so."""
    (manifest,) = (m for m in of_kind(found, kind) if m["metadata"]["name"].endswith(suffix))
    return manifest


def pods(found: list[Manifest]) -> Iterator[tuple[str, Manifest]]:
    """What each pod is, such as "decode" or "decode follower", with its template."""
    for manifest in found:
        match manifest["kind"]:
            case "Deployment":
                yield _component(manifest), manifest["spec"]["template"]
            case "LeaderWorkerSet":
                template = manifest["spec"]["leaderWorkerTemplate"]
                yield f"{_component(manifest)} leader", template["leaderTemplate"]
                yield f"{_component(manifest)} follower", template["workerTemplate"]
            case "Pod":
                yield _component(manifest), manifest


def container(template: Manifest) -> Manifest:
    """The one container of a pod."""
    (found,) = template["spec"]["containers"]
    return dict(found)


def selects(selector: Mapping[str, str], template: Manifest) -> bool:
    labels: dict[str, str] = template["metadata"]["labels"]
    return selector.items() <= labels.items()


def config_of(found: list[Manifest], role: str) -> Manifest:
    """The settings file of a service."""
    (text,) = (
        manifest["data"][f"{role}.yaml"]
        for manifest in of_kind(found, "ConfigMap")
        if f"{role}.yaml" in manifest["data"]
    )
    return dict(yaml.safe_load(text))


def environment_of(
    template: Manifest,
    *,
    address: str = "10.0.0.7",
    leader: str = "leader.demo",
    index: str = "1",
) -> dict[str, str]:
    """The container's variables as Kubernetes would give them to a pod with this address, and a LeaderWorkerSet to one of
    its pods."""
    given = {item["name"]: item.get("value", address) for item in container(template)["env"]}
    for name, value in {"LWS_LEADER_ADDRESS": leader, "LWS_WORKER_INDEX": index}.items():
        given = {key: text.replace(f"$({name})", value) for key, text in given.items()}
    return given


def _component(manifest: Manifest) -> str:
    return str(manifest["metadata"]["labels"]["app.kubernetes.io/component"])
