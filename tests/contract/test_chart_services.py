"""What the chart tells the services is what they take: arguments, files and environment, up to a token from real processes."""

from __future__ import annotations

import contextlib
import json
import os
import re
import runpy
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from common.config import load
from dspark.v1 import inference_service_pb2 as pb
from services.cli.configs import router_config
from services.cli.main import COMMANDS
from services.cli.ports import free_ports
from services.cli.settings import AllSettings
from tests.support.chart import (
    EXAMPLES,
    Manifest,
    config_of,
    container,
    environment_of,
    notes,
    pods,
    rendered,
    rendered_example,
    requires_helm,
)
from tests.support.http import get

pytestmark = requires_helm

ROOT = Path(__file__).parents[2]
START_S = 240.0
"""Far above what a start takes; a busy machine is no failure."""


def settings_of(
    template: Manifest, found: list[Manifest], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> AllSettings:
    """As the container's process would read them."""
    command, *arguments = container(template)["args"]
    (folder / f"{command}.yaml").write_text(yaml.safe_dump(config_of(found, command)))
    monkeypatch.delenv("DSPARK_CONFIG", raising=False)
    for name, value in environment_of(template).items():
        if name.startswith("DSPARK_"):
            monkeypatch.setenv(name, value)
    arguments = [text.replace("/etc/dspark", str(folder)) for text in arguments]
    known = COMMANDS[command]
    return load(known.settings, arguments, program="x", shown=known.shown, flat=known.flat)


@pytest.mark.parametrize("example", ["", *EXAMPLES])
def test_every_service_takes_what_the_chart_tells_it(
    example: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = rendered_example(example)
    for name, template in pods(found):
        role = name.split()[0]
        if role == "test":
            continue
        with monkeypatch.context() as environment:
            settings = settings_of(template, found, tmp_path, environment)
        section = getattr(settings, role)
        ports = {
            port["name"]: port["containerPort"] for port in container(template).get("ports", [])
        }
        if ports:
            assert (section.port, section.admin_port) == (ports["grpc"], ports["admin"])
        assert section.host == "0.0.0.0"
        assert str(settings.termination_log) == "/dev/termination-log"
        if role == "router":
            assert section.prefill_workers[0].startswith("dns:")
        else:
            assert settings.transfer.host == "10.0.0.7"
        if role == "prefill":
            assert section.advertise_host == "10.0.0.7"


@pytest.mark.parametrize("example", ["", *EXAMPLES])
def test_commands_of_the_notes_are_commands(example: str) -> None:
    text = notes(yaml.safe_load(EXAMPLES[example].read_text()) if example else {})
    for line in re.findall(r"^  dspark (.*)$", text, re.MULTILINE):
        command, *arguments = shlex.split(line)
        known = COMMANDS[command]
        load(known.settings, arguments, program="x", shown=known.shown, flat=known.flat)
    (service, method) = re.findall(r"dspark\.v1\.(\w+)/(\w+)", text)[0]
    assert method in pb.DESCRIPTOR.services_by_name[service].methods_by_name


def test_the_router_follows_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = rendered_example("")
    settings = settings_of(dict(pods(found))["router"], found, tmp_path, monkeypatch)
    config = router_config(settings)
    assert config.decode_addresses == (
        "dns:demo-dspark-decode-pods.serving.svc.cluster.local:50053",
    )
    assert config.drain_timeout_s == 120


def test_pods_of_one_worker_know_their_mesh_and_one_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = rendered_example("multinode-lws")
    template = dict(pods(found))["decode follower"]
    settings = settings_of(template, found, tmp_path, monkeypatch)
    mesh, meeting = settings.decode.mesh, settings.decode.rendezvous
    assert (mesh.dp, mesh.tp, mesh.ep) == (4, 4, 16)
    assert (meeting.address, meeting.num_nodes, meeting.node_rank) == ("leader.demo:29501", 2, 1)


@pytest.mark.parametrize("role", ["router", "decode"])
def test_the_hub_is_asked_for_what_the_service_reads(
    role: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The container's own command, run by the program that it names, up to its first question to the hub."""
    (fetch,) = dict(pods(rendered_example("nvidia-h200-1p1d")))[role]["spec"]["initContainers"]
    assert fetch["command"] == ["hf"]
    asked: dict[str, Any] = {}

    def snapshot(**arguments: Any) -> str:
        asked.update(arguments)
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.cli.download.snapshot_download", snapshot)
    monkeypatch.setattr(sys, "argv", ["hf", *fetch["args"]])
    with contextlib.suppress(SystemExit):
        runpy.run_module("huggingface_hub.cli.hf", run_name="__main__")
    assert asked["repo_id"] == "deepseek-ai/DeepSeek-V4-Flash-DSpark"
    assert (asked["revision"], asked["local_dir"]) == ("main", "/models/DeepSeek-V4-Flash-DSpark")
    assert asked["allow_patterns"] == (["*.json"] if role == "router" else None)
    (mount,) = (m for m in fetch["volumeMounts"] if m["name"] == "model")
    assert mount["mountPath"] == "/models" and not mount.get("readOnly")


def environment_here() -> dict[str, str]:
    """This process's own, with one thread for numbers; the machine is shared with other tests."""
    return os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'sdk'}"}


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Python with these arguments, to its good end."""
    return subprocess.run(
        [sys.executable, *arguments],
        env=environment_here(),
        capture_output=True,
        text=True,
        timeout=START_S,
        check=True,
    )


@contextlib.contextmanager
def process(arguments: list[str], environment: dict[str, str], log: Path) -> Iterator[None]:
    """A service, ended as Kubernetes ends it."""
    command = [sys.executable, "-m", "services.cli", *arguments]
    with log.open("wb") as output:
        running = subprocess.Popen(
            command, env=environment_here() | environment, stdout=output, stderr=output
        )
        try:
            yield
        finally:
            running.terminate()
            try:
                running.wait(timeout=60)
            except subprocess.TimeoutExpired:
                running.kill()
                running.wait()


def wait_until_ready(port: int, log: Path) -> None:
    end = time.monotonic() + START_S
    while time.monotonic() < end:
        with contextlib.suppress(OSError):
            if get(port, "/readyz")[0] == 200:
                return
        time.sleep(0.1)
    raise AssertionError(log.read_text())


def test_an_empty_install_answers_its_own_helm_test(tmp_path: Path) -> None:
    """All three services, with the files, arguments and environment that the chart gives them, but for ports, addresses and
    paths."""
    free = free_ports("127.0.0.1", 6)
    ports = dict(
        zip(("router", "prefill", "decode"), zip(free[::2], free[1::2], strict=True), strict=True)
    )
    values: dict[str, Any] = {
        role: {"port": port, "adminPort": admin_port} for role, (port, admin_port) in ports.items()
    }
    values["router"]["service"] = {"port": ports["router"][0]}
    values["settings"] = {role: {"threads": 1} for role in ("prefill", "decode")}
    found = rendered(values=values)
    templates = dict(pods(found))

    def here(text: str) -> str:
        text = re.sub(r"demo-dspark-[-\w]+\.serving\.svc\.cluster\.local", "127.0.0.1", text)
        text = text.replace("demo-dspark:", "127.0.0.1:")
        text = text.replace("/dev/termination-log", str(tmp_path / "end"))
        return text.replace("/etc/dspark", str(tmp_path))

    def pod(role: str) -> contextlib.AbstractContextManager[None]:
        (tmp_path / f"{role}.yaml").write_text(here(yaml.safe_dump(config_of(found, role))))
        given = environment_of(templates[role], address="127.0.0.1")
        # But for folders of the pod: compiled kernels are in this machine's own.
        environment = {key: text for key, text in given.items() if "/var/cache" not in text}
        arguments = [here(text) for text in container(templates[role])["args"]]
        return process(arguments, environment, tmp_path / f"{role}.log")

    admin_port = ports["router"][1]
    with pod("decode"), pod("prefill"), pod("router"):
        for role in ("decode", "prefill", "router"):
            wait_until_ready(ports[role][1], tmp_path / f"{role}.log")
        for role in ports:
            for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
                path = container(templates[role])[probe]["httpGet"]["path"]
                assert get(ports[role][1], path)[0] == 200
        # What the notes tell people to copy.
        (snippet,) = re.findall(r"python -c '(.*)'", notes(values))
        assert run("-c", snippet).stdout.strip()
        (path,) = re.findall(r"curl -s 'http://127.0.0.1:\d+(/metrics\S+)'", notes(values))
        assert "dspark_workers{" in get(admin_port, path)[1]
        exported = get(admin_port, "/metrics")[1]
        for family in ("dspark_role_queued_tokens", "dspark_role_running_tokens"):
            for role in ("prefill", "decode"):
                assert re.search(rf'^{family}{{.*role="{role}".*}}', exported, re.MULTILINE)
        arguments = [here(text) for text in container(templates["test"])["args"]]
        answer = run("-m", "services.cli", *arguments)
    completion = json.loads(answer.stdout.splitlines()[-1])["completion"]
    assert completion["usage"]["completion_tokens"] == 1
