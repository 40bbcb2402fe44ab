"""Configuration from flags, environment and a YAML file, in that order of strength. Knows sources; not which settings
exist: commands bring their own `Settings` class.

One name everywhere: the setting `decode.num_slots` is the flag `--decode.num-slots`, the variable
`DSPARK_DECODE__NUM_SLOTS` and the key `num_slots` under `decode:` in the file. This is the only server module that reads
or writes the environment.
"""

from __future__ import annotations

import difflib
import itertools
import json
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, create_model
from pydantic_settings import (
    BaseSettings,
    CliSettingsSource,
    CliSuppress,
    NoDecode,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    SettingsError,
    YamlConfigSettingsSource,
)

from common.errors import ConfigError

ENV_PREFIX = "DSPARK_"
_NO_AUTOLOAD = {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}

SettingsT = TypeVar("SettingsT", bound="Settings")


def _split(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    # The library writes a child's lists as JSON.
    return (
        json.loads(value) if value.startswith("[") else [part.strip() for part in value.split(",")]
    )


CommaSeparated = Annotated[tuple[str, ...], NoDecode, BeforeValidator(_split)]
"""Texts without commas; a list in the file, `a,b` in flags and environment."""


class Section(BaseModel):
    """A group of settings under one name."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Settings(BaseSettings):
    """What every command can be told. Subclasses add fields and `Section`s."""

    model_config = SettingsConfigDict(
        env_prefix=ENV_PREFIX,
        env_nested_delimiter="__",
        env_ignore_empty=True,
        extra="forbid",
        frozen=True,
        nested_model_default_partial_update=True,
        cli_avoid_json=True,
        cli_exit_on_error=False,
        cli_hide_none_type=True,
        cli_implicit_flags=True,
        cli_kebab_case=True,
        cli_use_class_docs_for_groups=True,
    )

    config: Path | None = Field(default=None, description="YAML file with settings")

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Flags come first by themselves; below them the environment, then the file."""
        path = init_settings().get("config") or env_settings().get("config")
        file = YamlConfigSettingsSource(settings_cls, yaml_file=path)
        return init_settings, env_settings, file


def load(
    settings_class: type[SettingsT],
    arguments: Sequence[str],
    *,
    program: str,
    shown: Collection[str] | None = None,
    flat: Sequence[str] = (),
) -> SettingsT:
    """Settings from `arguments`, the environment and the file that either of them names.

    `shown` limits what the help lists to these settings and sections; the others are accepted all the same.
    Settings named in `flat`, one by one or by section, have a second flag without the section; where two would be the
    same, the first wins. Prints the help and raises SystemExit when asked for it. Raises ConfigError that names the
    setting, where it came from and the likely intention.
    """
    short = _short_flags(settings_class, flat)
    if shown is not None:
        settings_class = _showing_only(settings_class, shown)
    try:
        flags: CliSettingsSource[SettingsT] = CliSettingsSource(
            settings_class,
            cli_prog_name=program,
            cli_parse_args=list(arguments),
            cli_shortcuts=short,
        )
        given = flags()
    except SettingsError as error:
        raise ConfigError(_flag_complaint(str(error), settings_class, short)) from None
    path = given.get("config") or os.environ.get(f"{ENV_PREFIX}CONFIG")
    _require_readable(path)
    _refuse_misspelt_variables(settings_class)
    sources: dict[str, Any] = {"_cli_settings_source": flags} | ({"config": path} if path else {})
    try:
        return settings_class(**sources)
    except ValidationError as error:
        complaints = (_complaint(settings_class, item, given) for item in error.errors())
        raise ConfigError("; ".join(complaints)) from None
    except (SettingsError, TypeError, ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"cannot read the settings: {' '.join(str(error).split())}") from None


def redacted(settings: Settings) -> dict[str, Any]:
    """What differs from the defaults as plain values, secrets as asterisks, for logs."""
    plain: dict[str, Any] = settings.model_dump(mode="json", exclude_defaults=True)
    return plain


def _short_flags(settings_class: type[Settings], flat: Sequence[str]) -> dict[str, str]:
    """Flags as the library wants them: long name to short name, in kebab case."""
    chosen: dict[str, str] = {}
    for wanted, name in itertools.product(flat, known_settings(settings_class)):
        section, _, last = name.rpartition(".")
        below = name.removeprefix(f"{wanted}.")
        short = last if wanted == name else below
        if (
            section
            and (wanted == name or below != name)
            and short not in settings_class.model_fields
        ):
            chosen.setdefault(short.replace("_", "-"), name.replace("_", "-"))
    return {long: short for short, long in chosen.items()}


def known_settings(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Dotted names of all settings below `model`."""
    for name, field in model.model_fields.items():
        yield prefix + name
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from known_settings(field.annotation, f"{prefix}{name}.")


def num_cores(quota: Path = Path("/sys/fs/cgroup/cpu.max")) -> int:
    """Cores that this process may use; in a container, which sees all of its machine, those that its limit is worth."""
    count = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    try:
        allowed, period = quota.read_text().split()
        return max(1, min(count, int(allowed) // int(period)))
    except (OSError, ValueError):  # no such file, or "max" for no limit
        return count


def limit_threads(num_threads: int) -> None:
    """Let numeric libraries of this process use so many threads; only what is imported later notices."""
    os.environ.update(_thread_variables(num_threads))


def quiet_native_logs() -> None:
    """gRPC's core tells of every connection that ends unless the environment says otherwise; only errors are news."""
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")


def load_devices_when_chosen() -> None:
    """Keep torch from importing every device library that is installed, torch_npu with all of CANN, as soon as it is
    imported itself: the one that is chosen is imported by name, and what it lacks is told then."""
    for name, value in _NO_AUTOLOAD.items():
        os.environ.setdefault(name, value)


def native_setting(name: str, value: str) -> None:
    """Tell a native library something that it takes from the environment only; what the environment says is stronger."""
    os.environ.setdefault(name, value)


def child_environment(num_threads: int) -> dict[str, str]:
    """The environment of a child process that is handed its whole configuration: our own variables are left out,
    because they would be stronger than what the parent resolved."""
    inherited = {name: value for name, value in os.environ.items() if not _is_ours(name)}
    return _NO_AUTOLOAD | inherited | _thread_variables(num_threads)


def _showing_only(settings_class: type[SettingsT], shown: Collection[str]) -> type[SettingsT]:
    suppress: Any = CliSuppress
    hidden: dict[str, Any] = {
        name: (suppress[field.annotation], field)
        for name, field in settings_class.model_fields.items()
        if name not in shown
    }
    return create_model(settings_class.__name__, __base__=settings_class, **hidden)


def _thread_variables(num_threads: int) -> dict[str, str]:
    count = str(num_threads)
    return {"OMP_NUM_THREADS": count, "MKL_NUM_THREADS": count, "NUMBA_NUM_THREADS": count}


def _is_ours(variable: str) -> bool:
    return variable.upper().startswith(ENV_PREFIX)


def _require_readable(path: str | Path | None) -> None:
    if path and not Path(path).is_file():
        raise ConfigError(f"there is no configuration file {path}")


def _refuse_misspelt_variables(settings_class: type[Settings]) -> None:
    """Sections check their own names; names at the top would be passed over in silence.

    Only names that look like ours are refused: Kubernetes puts DSPARK_PORT=tcp://… and its kin into every container that
    runs beside a Service of that name.
    """
    known = list(settings_class.model_fields)
    for variable in filter(_is_ours, os.environ):
        name, _, rest = variable[len(ENV_PREFIX) :].lower().partition("__")
        if name not in known and (rest or difflib.get_close_matches(name, known, cutoff=0.8)):
            raise ConfigError(f"{variable} is not a setting{_hint(name, known)}")


def _complaint(settings_class: type[Settings], item: Any, given: Mapping[str, Any]) -> str:
    """One validation error in words that name the setting and its source."""
    name = ".".join(str(part) for part in item["loc"])
    source = f"flag --{name.replace('_', '-')}" if _has(given, item["loc"]) else _elsewhere(name)
    if item["type"] == "extra_forbidden":
        return (
            f"{name} ({source}) is not a setting{_hint(name, list(known_settings(settings_class)))}"
        )
    message = item["msg"][0].lower() + item["msg"][1:]
    return f"{name} ({source}): {message.removeprefix('value error, ')}"


def _elsewhere(name: str) -> str:
    variable = ENV_PREFIX + name.replace(".", "__").upper()
    is_set = any(known.upper() == variable for known in os.environ)
    return variable if is_set else "configuration file"


def _has(values: Any, location: Sequence[int | str]) -> bool:
    for part in location:
        if not isinstance(values, Mapping) or part not in values:
            return False
        values = values[part]
    return True


def _flag_complaint(
    message: str, settings_class: type[Settings], short_flags: Mapping[str, str]
) -> str:
    message = message.removeprefix("error parsing CLI: ")
    unknown = message.removeprefix("unrecognized arguments: ").split()
    if message.startswith("unrecognized arguments: ") and unknown[0].startswith("-"):
        names = [*short_flags.values(), *known_settings(settings_class)]
        wanted = unknown[0].partition("=")[0].lstrip("-").removeprefix("no-").replace("-", "_")
        hint = _hint(wanted, [name.replace("-", "_") for name in names], flag=True)
        return f"{unknown[0]} is not a flag of this command{hint}"
    return message


def _hint(name: str, known: Sequence[str], *, flag: bool = False) -> str:
    """The closest known name as a question; empty when nothing is close."""
    # "router.prot" is compared as a whole, "prot" also with the last parts of longer names.
    by_end = {candidate.rpartition(".")[2]: candidate for candidate in reversed(known)}
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.7)
    close = close or [
        by_end[end] for end in difflib.get_close_matches(name, by_end, n=1, cutoff=0.7)
    ]
    if not close:
        return "; --help lists what there is"
    spelt = f"--{close[0].replace('_', '-')}" if flag else close[0]
    return f"; did you mean {spelt}?"
