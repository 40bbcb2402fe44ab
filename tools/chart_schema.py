"""Writes helm/dspark/values.schema.json. Knows the chart's values; the services' own settings it takes from their code.

Run by `make chart`; a test of the chart fails when the file was not written anew. No object but those of Kubernetes
itself takes a key that is not named here.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

from services.cli.settings import AllSettings

CHART = Path(__file__).resolve().parent.parent / "helm" / "dspark"
SCHEMA = CHART / "values.schema.json"

Schema = dict[str, Any]

CLIENT_SETTINGS = ("config", "up", "endpoint", "api_key", "timeout_s", "sampling", "status_fd")
"""Of commands that serve nothing."""

CHART_SETTINGS: dict[str, tuple[str, ...]] = {
    "": ("model", "shutdown_s", "termination_log", "admin"),
    "engine": ("device",),
    "transfer": ("host",),
    "router": ("host", "port", "admin_port", "prefill_workers", "decode_workers"),
    "prefill": ("host", "port", "admin_port", "advertise_host"),
    "prefill.mesh": ("dp", "tp", "ep"),
    "prefill.rendezvous": ("address", "num_nodes", "node_rank"),
    "decode": ("host", "port", "admin_port", "computes_prompts"),
    "decode.mesh": ("dp", "tp", "ep"),
    "decode.rendezvous": ("address", "num_nodes", "node_rank"),
}
"""What the chart decides from other values: each thing is said once."""

KUBERNETES: Schema = {"type": "object", "additionalProperties": True}
"""An object of Kubernetes' API, which checks it."""
KUBERNETES_LIST: Schema = {"type": "array", "items": KUBERNETES}
TEXTS: Schema = {"type": "object", "additionalProperties": {"type": "string"}}
TEXT: Schema = {"type": "string"}
NAME: Schema = {"type": "string", "pattern": "^$|^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$"}
FLAG: Schema = {"type": "boolean"}
NUMBER: Schema = {"type": "number"}
PORT: Schema = {"type": "integer", "minimum": 1, "maximum": 65535}
QUANTITY: Schema = {"type": "string", "pattern": "^[0-9]+(\\.[0-9]+)?(m|[kKMGTPE]i?)?$"}
ABSOLUTE_PATH: Schema = {"type": "string", "pattern": "^$|^/"}
RESOURCE: Schema = {"type": "string", "pattern": "^$|^[-a-zA-Z0-9.]+/[-a-zA-Z0-9._]+$"}


def main() -> int:
    """Write the schema."""
    SCHEMA.write_text(schema_text())
    return 0


def schema_text() -> str:
    return json.dumps(values_schema(), indent=2) + "\n"


def values_schema() -> Schema:
    """The whole of values.yaml. Draft 7, which every version of Helm reads."""
    settings, definitions = _settings()
    worker = _role() | {
        "accelerator": _closed(
            type={"enum": ["cpu", "nvidia", "ascend"]},
            count=_at_least(0),
        ),
        "mesh": _closed(dp=_at_least(1), tp=_at_least(1), ep=_at_least(1)),
        "multinode": _closed(size=_at_least(1), rendezvousPort=PORT, exclusiveTopologyKey=TEXT),
        "autoscaling": _closed(
            enabled=FLAG,
            minReplicas=_at_least(0),
            maxReplicas=_at_least(1),
            tokensPerReplica=_at_least(1),
        ),
    }
    router = _role() | {
        "service": _closed(
            type={"enum": ["ClusterIP", "NodePort", "LoadBalancer"]}, port=PORT, annotations=TEXTS
        ),
        "autoscaling": _closed(
            enabled=FLAG,
            minReplicas=_at_least(1),
            maxReplicas=_at_least(1),
            targetCPUUtilizationPercentage=_at_least(1),
        ),
    }
    schema = _closed(
        nameOverride=NAME,
        fullnameOverride=NAME,
        clusterDomain=NAME,
        commonLabels=TEXTS,
        extraObjects=KUBERNETES_LIST,
        image=_closed(
            registry=TEXT, pullPolicy=_pull_policy(), pullSecrets={"type": "array", "items": NAME}
        ),
        model=_model(),
        settings=settings,
        accelerators=_closed(cpu=_accelerator(), nvidia=_accelerator(), ascend=_accelerator()),
        adminKey=_closed(secretName=NAME, entry={"type": "string", "minLength": 1}),
        rdma=_closed(enabled=FLAG, resourceName=RESOURCE, count=_at_least(1)),
        shm=_closed(enabled=FLAG, sizeLimit=QUANTITY),
        router=_closed(**router),
        prefill=_closed(enabled=FLAG, **worker),
        decode=_closed(**worker),
        topologySpread=_closed(
            enabled=FLAG,
            topologyKey=TEXT,
            maxSkew=_at_least(1),
            whenUnsatisfiable={"enum": ["ScheduleAnyway", "DoNotSchedule"]},
        ),
        serviceAccount=_closed(create=FLAG, name=NAME, annotations=TEXTS),
        podSecurityContext=KUBERNETES,
        securityContext=KUBERNETES,
        networkPolicy=_closed(enabled=FLAG, clients=KUBERNETES_LIST, monitoring=KUBERNETES_LIST),
        keda=_closed(
            prometheusAddress={"type": "string", "pattern": "^$|^https?://"},
            pollingIntervalSeconds=_at_least(1),
            cooldownSeconds=_at_least(0),
        ),
        monitoring=_monitoring(),
        test=_closed(timeoutSeconds=_at_least(1)),
    )
    # Helm hands these to a chart that is part of another one.
    schema["properties"]["global"] = KUBERNETES
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": "Values of the dspark chart",
        **schema,
        "definitions": definitions,
    }


def _role() -> Schema:
    """What all three services have."""
    probe = _closed(
        periodSeconds=_at_least(1), timeoutSeconds=_at_least(1), failureThreshold=_at_least(1)
    )
    share = {"anyOf": [_at_least(0), {"type": "string", "pattern": "^[0-9]+%$"}]}
    return {
        "replicas": _at_least(0),
        "image": _closed(
            repository={"type": "string", "minLength": 1},
            tag={"type": "string", "not": {"const": "latest"}},
            digest={"type": "string", "pattern": "^$|^sha256:[0-9a-f]{64}$"},
        ),
        "port": PORT,
        "adminPort": PORT,
        "drain": _closed(preStopSeconds=_at_least(0), shutdownSeconds=_at_least(1)),
        "terminationGracePeriodSeconds": {"type": ["integer", "null"], "minimum": 1},
        "resources": _closed(requests=_quantities(), limits=_quantities()),
        "probes": _closed(startup=probe, readiness=probe, liveness=probe),
        "pdb": _closed(enabled=FLAG, maxUnavailable=share),
        "updateStrategy": KUBERNETES,
        "hostNetwork": FLAG,
        "env": KUBERNETES_LIST,
        "envFrom": KUBERNETES_LIST,
        "volumes": KUBERNETES_LIST,
        "volumeMounts": KUBERNETES_LIST,
        "initContainers": KUBERNETES_LIST,
        "nodeSelector": TEXTS,
        "tolerations": KUBERNETES_LIST,
        "affinity": KUBERNETES,
        "topologySpreadConstraints": KUBERNETES_LIST,
        "priorityClassName": NAME,
        "schedulerName": NAME,
        "podAnnotations": TEXTS,
        "podLabels": TEXTS,
    }


def _model() -> Schema:
    return _closed(
        name={"type": "string", "pattern": "^[A-Za-z0-9][-A-Za-z0-9._]*$"},
        source={"enum": ["builtin", "pvc", "hostPath", "image", "huggingFace"]},
        pvc=_closed(claimName=NAME, subPath=TEXT),
        hostPath=_closed(path=ABSOLUTE_PATH),
        image=_closed(reference=TEXT, pullPolicy=_pull_policy(), subPath=TEXT),
        huggingFace=_closed(
            repo={"type": "string", "pattern": "^$|^[^/ ]+/[^/ ]+$"},
            revision={"type": "string", "minLength": 1},
            endpoint={"type": "string", "pattern": "^$|^https?://"},
            tokenSecret=_closed(name=NAME, key={"type": "string", "minLength": 1}),
            cache=_closed(claimName=NAME, hostPath=ABSOLUTE_PATH, sizeLimit=QUANTITY),
        ),
    )


def _accelerator() -> Schema:
    return _closed(
        resourceName=RESOURCE,
        device={"type": "string", "minLength": 1},
        imageSuffix={"type": "string", "pattern": "^[a-z0-9]+$"},
        runtimeClassName=NAME,
        hostPaths={"type": "array", "items": {"type": "string", "pattern": "^/"}},
        env=KUBERNETES_LIST,
    )


def _monitoring() -> Schema:
    return _closed(
        monitor={"enum": ["", "PodMonitor", "ServiceMonitor"]},
        interval={"type": "string", "pattern": "^[0-9]+(ms|s|m)$"},
        labels=TEXTS,
        runbookUrl=TEXT,
        prometheusRule=_closed(
            enabled=FLAG, thresholds=_closed(**dict.fromkeys(_thresholds(), NUMBER))
        ),
        dashboards=_closed(enabled=FLAG, labels=TEXTS, annotations=TEXTS),
    )


def _thresholds() -> list[str]:
    """Names of what rules/thresholds.yaml records."""
    prefix = "dspark:threshold:"
    groups = yaml.safe_load((CHART / "rules" / "thresholds.yaml").read_text())["groups"]
    records = [rule["record"] for group in groups for rule in group["rules"]]
    return sorted(record.removeprefix(prefix) for record in records)


def _settings() -> tuple[Schema, Schema]:
    """The services' settings but for those that the chart decides, and the definitions that they refer to."""
    model = AllSettings.model_json_schema(ref_template="#/definitions/{model}")
    definitions: Schema = {name: _plain(found) for name, found in model["$defs"].items()}
    properties: Schema = _plain(model)["properties"]
    for name in CLIENT_SETTINGS:
        del properties[name]
    for section, names in CHART_SETTINGS.items():
        held = properties
        for part in section.split(".") if section else ():
            held = definitions[held[part]["$ref"].rpartition("/")[2]]["properties"]
        for name in names:
            held.pop(name, None)  # two sections may have one definition
    properties = {name: properties[name] for name in sorted(properties)}
    return _closed(**properties), _referred(properties, definitions)


def _plain(schema: Any) -> Any:
    """Without what only repeats names and defaults of the code."""
    if isinstance(schema, list):
        return [_plain(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    plain = {key: _plain(value) for key, value in schema.items() if key != "default"}
    if isinstance(plain.get("title"), str):
        del plain["title"]
    # Draft 7 looks at nothing beside a reference.
    return {"$ref": plain["$ref"]} if "$ref" in plain else plain


def _referred(schema: Schema, definitions: Schema) -> Schema:
    """Definitions that `schema` names, and those that they name."""
    found: Schema = {}
    waiting = [schema]
    while waiting:
        text = json.dumps(waiting.pop())
        for name, definition in definitions.items():
            if f'"#/definitions/{name}"' in text and name not in found:
                found[name] = definition
                waiting.append(definition)
    return {name: found[name] for name in sorted(found)}


def _closed(**properties: Schema) -> Schema:
    """An object that takes these keys and no others."""
    return {"type": "object", "additionalProperties": False, "properties": properties}


def _at_least(minimum: int) -> Schema:
    return {"type": "integer", "minimum": minimum}


def _quantities() -> Schema:
    return {"type": "object", "additionalProperties": {"anyOf": [QUANTITY, _at_least(0)]}}


def _pull_policy() -> Schema:
    return {"enum": ["Always", "IfNotPresent", "Never"]}


if __name__ == "__main__":
    raise SystemExit(main())
