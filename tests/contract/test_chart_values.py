"""The chart's values: each is used, and each misspelling is refused."""

from __future__ import annotations

import copy
import functools
import json
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jsonschema
import yaml

from tests.support.chart import CHART, EXAMPLES, Refused, rendered_text, requires_helm
from tools.chart_schema import SCHEMA, schema_text

Values = dict[str, Any]
Path = tuple[str, ...]

DEFAULTS: Values = yaml.safe_load((CHART / "values.yaml").read_text())
ROLES = ("router", "prefill", "decode")

CONTEXTS: dict[Path, Values] = {
    ("model", "pvc"): {"model": {"name": "m", "source": "pvc", "pvc": {"claimName": "c"}}},
    ("model", "hostPath"): {
        "model": {"name": "m", "source": "hostPath", "hostPath": {"path": "/m"}}
    },
    ("model", "image"): {"model": {"name": "m", "source": "image", "image": {"reference": "r"}}},
    ("model", "huggingFace"): {
        "model": {
            "name": "m",
            "source": "huggingFace",
            "huggingFace": {"repo": "o/m", "tokenSecret": {"name": "s"}},
        }
    },
    ("model", "name"): {"model": {"source": "pvc", "pvc": {"claimName": "c"}}},
    ("accelerators", "nvidia"): {"decode": {"accelerator": {"type": "nvidia", "count": 1}}},
    ("accelerators", "ascend"): {"decode": {"accelerator": {"type": "ascend", "count": 1}}},
    ("adminKey",): {"adminKey": {"secretName": "s"}},
    ("rdma",): {"rdma": {"enabled": True, "resourceName": "rdma/ib"}},
    ("keda",): {
        "prefill": {"autoscaling": {"enabled": True}},
        "keda": {"prometheusAddress": "http://prometheus"},
    },
    ("monitoring",): {"monitoring": {"monitor": "PodMonitor"}},
    ("monitoring", "prometheusRule", "thresholds"): {
        "monitoring": {"prometheusRule": {"enabled": True}}
    },
    ("monitoring", "dashboards"): {"monitoring": {"dashboards": {"enabled": True}}},
    ("monitoring", "runbookUrl"): {"monitoring": {"dashboards": {"enabled": True}}},
    **{
        (role, "autoscaling"): {
            role: {"autoscaling": {"enabled": True}},
            "keda": {"prometheusAddress": "http://prometheus"},
        }
        for role in ROLES
    },
    **{
        (role, "multinode"): {role: {"multinode": {"size": 2}, "mesh": {"dp": 2}}}
        for role in ROLES[1:]
    },
    **{(role, "mesh"): {role: {"mesh": {"dp": 2, "tp": 2}}} for role in ROLES[1:]},
}
"""What a value needs to matter, by the beginning of its path; the longest counts."""

SAMPLES: dict[Path, Any] = {
    ("nameOverride",): "other",
    ("image", "pullPolicy"): "Always",
    ("model", "image", "pullPolicy"): "Always",
    ("model", "huggingFace", "repo"): "o/other",
    ("model", "huggingFace", "endpoint"): "https://hub.example.com",
    ("model", "huggingFace", "cache", "hostPath"): "/cache",
    ("model", "hostPath", "path"): "/other",
    ("rdma", "resourceName"): "rdma/other",
    ("keda", "prometheusAddress"): "http://other",
    ("monitoring", "monitor"): "ServiceMonitor",
    ("monitoring", "interval"): "7s",
    ("monitoring", "prometheusRule", "thresholds"): {"first_token_seconds": 1.5},
    ("topologySpread", "whenUnsatisfiable"): "DoNotSchedule",
    ("router", "service", "type"): "LoadBalancer",
    ("settings", "log", "level"): "debug",
    ("settings", "log", "format"): "text",
    ("settings", "engine"): {"dtype": "bfloat16"},
    ("settings", "transfer"): {"engine": "grpc"},
    ("settings", "tracing"): {"endpoint": "http://collector:4317"},
    ("settings", "router"): {"max_queued": 3},
    ("settings", "prefill"): {"num_slots": 3},
    ("settings", "decode"): {"num_slots": 3},
    ("podSecurityContext",): {"fsGroup": 3},
    ("securityContext",): {"privileged": False},
    ("extraObjects",): [{"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "x"}}],
    ("image", "pullSecrets"): ["secret"],
    **{
        ("accelerators", kind, "resourceName"): "example.com/device"
        for kind in ("nvidia", "ascend")
    },
    **{("accelerators", kind, "hostPaths"): ["/driver"] for kind in ("cpu", "nvidia", "ascend")},
    **{(role, "image", "digest"): f"sha256:{'0' * 64}" for role in ROLES},
    **{(role, "terminationGracePeriodSeconds"): 999 for role in ROLES},
    **{(role, "mesh", "ep"): 4 for role in ROLES[1:]},
    **{
        (role, "resources", kind): {"cpu": "7"} for role in ROLES for kind in ("requests", "limits")
    },
}
"""Other values where one cannot be made from the default."""

REFUSED: dict[Path, Any] = {
    ("model", "source"): "huggingFace",
    ("accelerators", "cpu", "resourceName"): "example.com/device",
    **{(role, "accelerator", "type"): "nvidia" for role in ROLES[1:]},
    **{(role, "accelerator", "count"): 3 for role in ROLES[1:]},
    **{(role, "multinode", "size"): 3 for role in ROLES[1:]},
}
"""Values that cannot be changed alone: that the chart says so is how they matter."""


@functools.cache
def schema() -> Any:
    return json.loads(SCHEMA.read_text())


def definition(found: dict[str, Any]) -> dict[str, Any]:
    if "$ref" in found:
        return dict(schema()["definitions"][found["$ref"].rpartition("/")[2]])
    return found


def leaves(values: Any, found: dict[str, Any], path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Every value that has a name of its own; settings are tested by the services themselves."""
    keys = definition(found).get("properties")
    if not isinstance(values, dict) or not keys or (path and not values):
        yield path, values
        return
    for key, value in values.items():
        yield from leaves(value, keys[key], (*path, key))


def other(path: Path, value: Any) -> Any:
    if path in (REFUSED | SAMPLES):
        return (REFUSED | SAMPLES)[path]
    match value:
        case bool():
            return not value
        case int():
            return value + 1
        case str() if path[-1] == "sizeLimit":
            return "7Gi"
        case str():
            return "other"
        case dict():
            return {"other": "thing"}
        case list():
            return [{"name": "other"}]
    raise AssertionError(f"no other value for {'.'.join(path)}")


def context(path: Path) -> Values:
    fitting = [known for known in CONTEXTS if path[: len(known)] == known]
    return CONTEXTS[max(fitting, key=len)] if fitting else {}


def at(values: Values, path: Path, otherwise: Any) -> Any:
    """What a context already says of a value, which is what another one has to differ from."""
    held: Any = values
    for key in path:
        if not isinstance(held, dict) or key not in held:
            return otherwise
        held = held[key]
    return held


def outcome(values: Values) -> str:
    """What is rendered, or what the chart itself, not its schema, has against it."""
    try:
        return rendered_text(values=values)
    except Refused as refused:
        assert "validate.yaml" in str(refused), refused
        return str(refused)


def part_of(text: str, role: str) -> str:
    """The manifests of one role; all of them without one."""
    if not role:
        return text
    label = f"app.kubernetes.io/component: {role}\n"
    return "".join(part for part in text.split("---\n") if label in part.partition("spec:")[0])


def change(path: Path, value: Any) -> tuple[Values, Values, str]:
    """Values before and after a change of the one at `path`, and the role whose manifests it should change.

    What router and prefill both have is changed for both at once: the runs of helm are what takes time.
    """
    role = path[0] if path[0] in ROLES and path not in REFUSED else ""
    together = ("router", "prefill") if role in ("router", "prefill") else (path[0],)
    same = [(twin, *path[1:]) for twin in together]
    same = [twin for twin in same if at(DEFAULTS, twin, None) is not None or twin == path]
    before = merged(*map(context, same))
    after = [
        nested(twin, other(twin, at(before, twin, at(DEFAULTS, twin, value)))) for twin in same
    ]
    return before, merged(before, *after), role


@requires_helm
def test_every_value_is_used() -> None:
    paths = dict(leaves(DEFAULTS, schema()))
    assert len(paths) > 150
    changes = {path: change(path, value) for path, value in paths.items()}
    variants = {json.dumps(values): values for change in changes.values() for values in change[:2]}
    with ThreadPoolExecutor(2) as pool:
        texts = dict(zip(variants, pool.map(outcome, variants.values()), strict=True))
    unused, refused = set(), set()
    for path, (before, after, role) in changes.items():
        text_before, text_after = texts[json.dumps(before)], texts[json.dumps(after)]
        assert not text_before.startswith("Error:"), path
        if text_after.startswith("Error:"):
            refused.add(path)
        elif part_of(text_before, role) == part_of(text_after, role):
            unused.add(path)
    assert unused == set()
    assert refused == set(REFUSED)


def objects(values: Any, path: Path = ()) -> Iterator[Path]:
    if isinstance(values, dict):
        yield path
        for key, value in values.items():
            yield from objects(value, (*path, key))


def is_free(path: Path) -> bool:
    """Whether an object is Kubernetes' own or a map of the user's names."""
    found = schema()
    for key in path:
        found = definition(found).get("properties", {}).get(key, {})
    return definition(found).get("additionalProperties") is not False


def test_every_misspelt_key_is_refused() -> None:
    validator = jsonschema.Draft7Validator(schema())
    assert validator.is_valid(DEFAULTS)
    tried = 0
    for path in objects(DEFAULTS):
        if is_free(path):
            continue
        held: Any = functools.reduce(dict.__getitem__, path, DEFAULTS)
        for key in (*held, "zz"):
            for typo in (f"{key}s", key[:-1], key.swapcase()):
                values = copy.deepcopy(DEFAULTS)
                target: Any = functools.reduce(dict.__getitem__, path, values)
                if typo in target:
                    continue
                target[typo] = target.get(key)
                assert not validator.is_valid(values), ".".join((*path, typo))
                tried += 1
    assert tried > 500


def test_the_free_objects_are_kubernetes_own_or_maps_of_names() -> None:
    free = {path[-1] for path in objects(DEFAULTS) if path and is_free(path)}
    assert free == {
        *("affinity", "annotations", "commonLabels", "labels", "nodeSelector", "podAnnotations"),
        *("podLabels", "podSecurityContext", "securityContext", "updateStrategy"),
        *("seccompProfile", "capabilities", "requests", "limits"),
    }


def merged(*layers: Mapping[str, Any]) -> Values:
    """Later layers win, key by key."""
    result: Values = {}
    for layer in layers:
        for key, value in layer.items():
            if isinstance(value, Mapping) and isinstance(result.get(key), dict):
                result[key] = merged(result[key], value)
            else:
                result[key] = copy.deepcopy(value)
    return result


def nested(path: Sequence[str], value: Any) -> Values:
    """`value` as the one leaf at `path`."""
    for key in reversed(path):
        value = {key: value}
    return dict(value)


def test_the_schema_knows_the_services_settings_of_today() -> None:
    assert SCHEMA.read_text() == schema_text(), "run make chart"


def test_every_example_is_within_the_schema() -> None:
    for path in EXAMPLES.values():
        jsonschema.Draft7Validator(schema()).validate(yaml.safe_load(path.read_text()))


@requires_helm
def test_a_cluster_without_prefill_workers_computes_prompts_on_decode() -> None:
    text = rendered_text(values={"prefill": {"enabled": False}})
    assert "computes_prompts: true" in text
    assert "component: prefill" not in text
    assert "prefill_workers: []" in text
