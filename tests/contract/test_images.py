"""Image and compose files, without a container engine: what they copy, install and start is there and is understood."""

from __future__ import annotations

import contextlib
import fnmatch
import importlib.metadata
import json
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from dockerfile_parse import DockerfileParser
from packaging.requirements import Requirement
from prometheus_client import CollectorRegistry

from common.config import load
from common.telemetry.admin import AdminServer
from common.telemetry.probes import Probes
from services.cli.main import COMMANDS
from services.cli.ports import free_ports
from services.cli.process import HURRY_S, STOP_MARGIN_S
from services.cli.settings import AllSettings
from tests.support.chart import CHART

ROOT = Path(__file__).parents[2]
STAGES = ("wheels", "router-packages", "worker-packages", "router", "worker")
FINAL = ("router", "worker")
HADOLINT = shutil.which("hadolint", path=str(Path(sys.executable).parent)) or shutil.which(
    "hadolint"
)


def instructions(stage: str) -> list[tuple[str, str]]:
    """Of one stage, in order."""
    parser = DockerfileParser(str(ROOT))
    found: dict[str, list[tuple[str, str]]] = {"": []}
    name = ""
    for item in parser.structure:
        if item["instruction"] == "FROM":
            name = item["value"].partition(" AS ")[2]
            found[name] = []
        found[name].append((item["instruction"], item["value"]))
    assert tuple(found) == ("", *STAGES)
    return found[stage]


def value_of(stage: str, instruction: str) -> str:
    """The last one counts."""
    return [value for name, value in instructions(stage) if name == instruction][-1]


def bake() -> dict[str, Any]:
    return dict(json.loads((ROOT / "docker-bake.json").read_text()))


def compose() -> dict[str, Any]:
    return dict(yaml.safe_load((ROOT / "compose.yaml").read_text()))


def settings_of(arguments: list[str]) -> AllSettings:
    command, *rest = arguments
    known = COMMANDS[command]
    return load(known.settings, rest, program="x", shown=known.shown, flat=known.flat)


def project() -> dict[str, Any]:
    return dict(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"])


@pytest.mark.skipif(HADOLINT is None, reason="hadolint is not installed")
def test_the_linter_finds_nothing() -> None:
    assert HADOLINT is not None
    done = subprocess.run([HADOLINT, ROOT / "Dockerfile"], capture_output=True, text=True)
    assert (done.stdout, done.returncode) == ("", 0)


@pytest.mark.parametrize("stage", STAGES)
def test_everything_copied_exists_and_reaches_the_builder(stage: str) -> None:
    kept = [
        line[1:]
        for line in (ROOT / ".dockerignore").read_text().splitlines()
        if line.startswith("!")
    ]
    for name, value in instructions(stage):
        flags = re.findall(r"--(\w+)=(\S+)", value)
        sources = [text for text in value.split() if not text.startswith("--")][:-1]
        if name != "COPY":
            continue
        if origin := dict(flags).get("from"):
            assert origin in STAGES[: STAGES.index(stage)]
            continue
        for source in sources:
            assert (ROOT / source).exists(), source
            assert any(source.startswith(entry) or entry.startswith(source) for entry in kept)


def test_a_wheel_can_be_made_of_what_is_copied(tmp_path: Path) -> None:
    """What the build reads is in the image: the folders of the wheel, and the files that the project names."""
    copied = {
        source
        for name, value in instructions("wheels")
        if name == "COPY"
        for source in value.split()[:-1]
    }
    hatch = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]
    for needed in (
        "pyproject.toml",
        *project()["license-files"],
        *hatch["targets"]["wheel"]["only-include"],
    ):
        assert any(needed == source or needed.startswith(f"{source}/") for source in copied), needed
    ignored = [
        line for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")
    ]
    assert "!checkpoints/dspark-tiny" in ignored, "other checkpoints do not belong in an image"


@pytest.mark.parametrize("stage", FINAL)
def test_an_image_is_labelled_runs_as_nobody_and_says_whether_it_is_well(stage: str) -> None:
    assert value_of(stage, "USER") == "10001:10001"
    labels = value_of(stage, "LABEL")
    for name in ("title", "description", "version", "revision", "licenses"):
        assert f"org.opencontainers.image.{name}=" in labels
    check = json.loads(value_of(stage, "HEALTHCHECK").partition(" CMD ")[2])
    assert check == ["/opt/dspark/bin/python", "/usr/local/bin/dspark-healthcheck"]
    assert json.loads(value_of(stage, "ENTRYPOINT")) == ["dspark-entrypoint"]


@pytest.mark.parametrize("stage", FINAL)
def test_what_an_image_starts_by_itself_is_understood(stage: str) -> None:
    command = json.loads(value_of(stage, "CMD"))
    settings = settings_of(command)
    section = getattr(settings, command[0])
    assert (section.host, section.admin_port) == ("0.0.0.0", 9090)
    exposed = set(map(int, value_of(stage, "EXPOSE").split()))
    ports = (
        {settings.router.port}
        if stage == "router"
        else {settings.prefill.port, settings.decode.port}
    )
    assert exposed == ports | {section.admin_port}


def requirements(extras: set[str], seen: set[tuple[str, str]] | None = None) -> set[str]:
    """Names of all packages that an installation brings, by the metadata of what is installed here."""
    seen = set() if seen is None else seen
    waiting = [("dspark-serving", extra) for extra in (*extras, "")]
    while waiting:
        name, extra = waiting.pop()
        if (name, extra) in seen:
            continue
        seen.add((name, extra))
        if name == "dspark-serving":
            own = project()
            wanted = own["optional-dependencies"][extra] if extra else own["dependencies"]
        else:
            try:
                wanted = importlib.metadata.requires(name) or []
            except importlib.metadata.PackageNotFoundError:
                continue  # of another platform
        for text in wanted:
            need = Requirement(text)
            if need.marker is None or need.marker.evaluate({"extra": extra}):
                found = re.sub(r"[-_.]+", "-", need.name).lower()
                waiting += [(found, ""), *((found, each) for each in need.extras)]
    return {name for name, _ in seen}


def test_the_router_image_has_no_torch_and_the_worker_image_has() -> None:
    (install,) = (v for n, v in instructions("router-packages") if n == "RUN")
    (extras,) = re.findall(r"dspark_serving-\S+\)\[(\S+)\]", install)
    router = requirements(set(extras.split(",")))
    assert {"grpcio", "tokenizers", "huggingface-hub"} <= router
    assert not {name for name in router if fnmatch.fnmatch(name, "*torch*") or "cuda" in name}
    (default,) = (v for n, v in instructions("worker-packages") if n == "ARG" and "EXTRAS" in v)
    assert "torch" in requirements(set(default.partition("=")[2].strip('"').split(",")))


def test_the_router_starts_where_torch_cannot_be_imported() -> None:
    """The import of everything that `dspark router` and `dspark generate` need, with torch and numpy gone."""
    code = (
        "import sys\n"
        "for name in ('torch', 'numpy', 'numba', 'safetensors', 'transformers'): sys.modules[name] = None\n"
        "import services.cli.commands.router, services.cli.commands.generate, services.router.app\n"
        "import services.cli.main\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, timeout=120)


def test_every_image_of_the_bake_file_is_a_stage_with_arguments_that_it_has() -> None:
    file = bake()
    assert file["group"]["default"]["targets"] == [n for n in file["target"] if n != "common"]
    declared = {
        value.partition("=")[0]
        for stage in ("", *STAGES)
        for name, value in instructions(stage)
        if name == "ARG"
    }
    extras = project()["optional-dependencies"]
    for name, target in file["target"].items():
        assert set(target.get("args", {})) <= declared, name
        assert set(re.findall(r"\${(\w+)}", json.dumps(target))) <= set(file["variable"])
        if name != "common":
            assert target["target"] in FINAL
        for extra in filter(None, target.get("args", {}).get("EXTRAS", "").split(",")):
            assert extra in extras


def test_the_chart_asks_for_the_images_that_are_baked() -> None:
    file = bake()
    variables = {name: item["default"] for name, item in file["variable"].items()}

    def filled(text: str) -> str:
        return re.sub(r"\${(\w+)}", lambda match: str(variables[match[1]]), text)

    baked = {filled(tag) for target in file["target"].values() for tag in target.get("tags", [])}
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    version = yaml.safe_load((CHART / "Chart.yaml").read_text())["appVersion"]
    asked = {f"{values['router']['image']['repository']}:{version}"} | {
        f"{values[role]['image']['repository']}:{version}-{preset['imageSuffix']}"
        for role in ("prefill", "decode")
        for preset in values["accelerators"].values()
    }
    assert asked == baked
    assert version == project()["version"] == variables["VERSION"]


def test_compose_starts_what_it_names() -> None:
    file = compose()
    services = file["services"]
    baked = {stage: f"dspark-serving-{stage}:{project()['version']}" for stage in FINAL}
    for name, service in services.items():
        stage = "router" if name == "router" else "worker"
        assert service["build"]["target"] == stage
        assert service["image"].startswith(baked[stage])
        settings = settings_of(service["command"])
        section = getattr(settings, name)
        assert (section.host, section.admin_port) == ("0.0.0.0", 9090)
        grace_s = int(service["stop_grace_period"].removesuffix("s"))
        assert grace_s >= settings.shutdown_s + STOP_MARGIN_S + HURRY_S
        assert service["read_only"] and service["cap_drop"] == ["ALL"]
    router = settings_of(services["router"]["command"]).router
    for role in ("prefill", "decode"):
        port = getattr(settings_of(services[role]["command"]), role).port
        assert getattr(router, f"{role}_workers") == (f"dns:{role}:{port}",)
    assert settings_of(services["prefill"]["command"]).prefill.advertise_host == "prefill"
    for mapping in services["router"]["ports"]:
        address, outside, inside = mapping.split(":")
        assert address == "127.0.0.1"
        assert outside == inside and int(inside) in (router.port, router.admin_port)


def test_the_entrypoint_becomes_the_command_with_its_arguments(tmp_path: Path) -> None:
    fake = tmp_path / "dspark"
    fake.write_text('#!/bin/sh\necho "$$" "$@"\n')
    fake.chmod(0o755)
    running = subprocess.Popen(
        ["sh", ROOT / "docker" / "entrypoint.sh", "decode", "--model", "a b"],
        env={"PATH": f"{tmp_path}:/usr/bin:/bin"},
        stdout=subprocess.PIPE,
        text=True,
    )
    output, _ = running.communicate(timeout=60)
    assert output == f"{running.pid} decode --model a b\n"


def test_the_health_check_follows_readiness() -> None:
    (port,) = free_ports("127.0.0.1", 1)
    probes = Probes()
    admin = AdminServer(CollectorRegistry(), probes, host="127.0.0.1", port=port)

    def check() -> subprocess.CompletedProcess[str]:
        environment = {"HEALTH_PORT": str(port), "http_proxy": "http://127.0.0.1:1"}
        command = [sys.executable, str(ROOT / "docker" / "healthcheck.py")]
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)

    with contextlib.closing(admin):
        starting = check()
        probes.started(why_not_ready=lambda: None)
        ready = check()
    gone = check()
    assert [done.returncode for done in (starting, ready, gone)] == [1, 0, 1]
    assert "not ready" in starting.stderr
