"""Configuration: which source wins, what is refused and in which words, what is never shown."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from pydantic import Field, SecretStr

from common.config import (
    CommaSeparated,
    Section,
    Settings,
    child_environment,
    known_settings,
    load,
    load_devices_when_chosen,
    num_cores,
    redacted,
)
from common.errors import ConfigError


class Oven(Section):
    """An oven."""

    heat: int = Field(default=180, ge=0)
    has_fan: bool = True
    trays: CommaSeparated = ("top",)


class Kitchen(Settings):
    cook: str = "anna"
    key: SecretStr | None = None
    oven: Oven = Oven()


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("DSPARK_")]:
        monkeypatch.delenv(name)


def kitchen(*arguments: str, **options: Any) -> Kitchen:
    return load(Kitchen, arguments, program="dspark cook", **options)


def write(folder: Path, text: str) -> str:
    path = folder / "kitchen.yaml"
    path.write_text(text)
    return str(path)


def test_flags_win_over_environment_over_file_over_defaults(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path, "cook: file\noven: {heat: 1, has_fan: false, trays: [file]}")
    monkeypatch.setenv("DSPARK_OVEN__HEAT", "2")
    monkeypatch.setenv("DSPARK_COOK", "environment")
    settings = kitchen("--config", path, "--oven.heat", "3")
    assert settings.oven == Oven(heat=3, has_fan=False, trays=("file",))
    assert settings.cook == "environment"
    assert settings.key is None


def test_the_file_may_be_named_by_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DSPARK_CONFIG", write(tmp_path, "cook: file"))
    assert kitchen().cook == "file"


def test_one_setting_of_a_section_leaves_the_others_at_their_defaults() -> None:
    assert kitchen("--oven.heat=5").oven == Oven(heat=5)


def test_lists_are_given_with_commas_or_by_repetition(monkeypatch: pytest.MonkeyPatch) -> None:
    assert kitchen("--oven.trays", "a,b").oven.trays == ("a", "b")
    assert kitchen("--oven.trays", "a", "--oven.trays", "b").oven.trays == ("a", "b")
    assert kitchen("--oven.trays", "a:1").oven.trays == ("a:1",)
    monkeypatch.setenv("DSPARK_OVEN__TRAYS", "a:1, b:2")
    assert kitchen().oven.trays == ("a:1", "b:2")


def test_flat_flags_are_second_names_and_the_first_of_two_wins() -> None:
    settings = kitchen("--heat", "7", "--no-has-fan", flat=("oven",))
    assert settings.oven == Oven(heat=7, has_fan=False)
    # A flat flag never hides a setting at the top.
    assert kitchen("--cook", "x", flat=("oven",)).cook == "x"


def test_hidden_settings_are_accepted_and_not_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert kitchen("--oven.heat", "8", shown={"cook"}).oven.heat == 8
    with pytest.raises(SystemExit) as exit_:
        kitchen("--help", shown={"cook"})
    assert exit_.value.code == 0
    shown = capsys.readouterr().out
    assert "--cook" in shown
    assert "--oven" not in shown


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (
            ["--oven.haet", "1"],
            "--oven.haet is not a flag of this command; did you mean --oven.heat?",
        ),
        (["--haet", "1"], "--haet is not a flag of this command; did you mean --oven.heat?"),
        (["--no-oven.has-fun"], "did you mean --oven.has-fan?"),
        (["--zzz"], "--zzz is not a flag of this command; --help lists what there is"),
        (["surplus"], "surplus"),
    ],
)
def test_an_unknown_flag_is_refused_with_the_likely_one(arguments: list[str], hint: str) -> None:
    with pytest.raises(ConfigError, match=hint.replace("?", r"\?")):
        kitchen(*arguments)


def test_an_unknown_key_is_refused_with_the_likely_one(tmp_path: Path) -> None:
    path = write(tmp_path, "oven: {haet: 1}\ncok: x")
    with pytest.raises(ConfigError) as error:
        kitchen("--config", path)
    assert "oven.haet (configuration file) is not a setting; did you mean oven.heat?" in str(
        error.value
    )
    assert "cok (configuration file) is not a setting; did you mean cook?" in str(error.value)


@pytest.mark.parametrize("name", ["DSPARK_OVEN__HAET", "DSPARK_OVENS__HEAT", "DSPARK_COOKK"])
def test_a_misspelt_variable_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "1")
    with pytest.raises(ConfigError, match=f"{name}.*not a setting; did you mean"):
        kitchen()


def test_variables_that_kubernetes_sets_for_a_service_are_not_ours(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("DSPARK_PORT", "tcp://10.0.0.1:50051")
    monkeypatch.setenv("DSPARK_ROUTER_SERVICE_HOST", "10.0.0.1")
    assert kitchen() == Kitchen()


def test_a_value_out_of_range_is_refused_with_its_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(
        ConfigError, match=r"oven.heat \(flag --oven.heat\): input should be greater"
    ):
        kitchen("--oven.heat", "-1")
    with pytest.raises(
        ConfigError, match=r"oven.heat \(configuration file\): input should be a valid"
    ):
        kitchen("--config", write(tmp_path, "oven: {heat: warm}"))
    monkeypatch.setenv("DSPARK_OVEN__HEAT", "warm")
    with pytest.raises(
        ConfigError, match=r"oven.heat \(DSPARK_OVEN__HEAT\): input should be a valid"
    ):
        kitchen()


@pytest.mark.parametrize("text", [": [", "just words", "- a\n- b"])
def test_a_file_that_is_no_mapping_is_refused(text: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read the settings"):
        kitchen("--config", write(tmp_path, text))


def test_a_missing_file_is_named() -> None:
    with pytest.raises(ConfigError, match=r"no configuration file /nowhere.yaml"):
        kitchen("--config", "/nowhere.yaml")


def test_secrets_are_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DSPARK_KEY", "sentinel-4711")
    settings = kitchen()
    assert settings.key is not None
    assert settings.key.get_secret_value() == "sentinel-4711"
    assert redacted(settings) == {"key": "**********"}
    assert "sentinel" not in f"{settings} {settings!r}"
    monkeypatch.setenv("DSPARK_OVEN__HEAT", "sentinel-4711")
    with pytest.raises(ConfigError) as error:
        kitchen()
    assert "sentinel" not in str(error.value)


def test_known_settings_are_dotted() -> None:
    assert list(known_settings(Kitchen)) == [
        *("config", "cook", "key", "oven", "oven.heat", "oven.has_fan", "oven.trays")
    ]


def test_children_inherit_the_environment_but_none_of_our_settings(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("DSPARK_COOK", "x")
    monkeypatch.setenv("PAN", "y")
    environment = child_environment(3)
    assert "DSPARK_COOK" not in environment
    assert environment["PAN"] == "y"
    assert environment["OMP_NUM_THREADS"] == "3"


def test_no_process_has_torch_load_devices_that_nobody_has_chosen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """But for one that is told to, as for a debugger of such a device."""
    name = "TORCH_DEVICE_BACKEND_AUTOLOAD"
    # Set first, so that it is put back afterwards whatever happens in between.
    monkeypatch.setenv(name, "1")
    load_devices_when_chosen()
    assert os.environ[name] == child_environment(1)[name] == "1"
    monkeypatch.delenv(name)
    assert child_environment(1)[name] == "0"
    load_devices_when_chosen()
    assert os.environ[name] == "0"


@pytest.mark.parametrize(
    "limit, cores", [("150000 100000", 1), ("50000 100000", 1), ("max 100000", 0), ("", 0)]
)
def test_a_containers_limit_counts_and_no_limit_does_not(
    limit: str, cores: int, tmp_path: Path
) -> None:
    quota = tmp_path / "cpu.max"
    quota.write_text(limit)
    assert num_cores(quota) == (cores or num_cores(tmp_path / "none"))


def test_a_limit_above_the_machine_is_the_machine(tmp_path: Path) -> None:
    quota = tmp_path / "cpu.max"
    quota.write_text("100000000 100000")
    assert num_cores(quota) == num_cores(tmp_path / "none")
