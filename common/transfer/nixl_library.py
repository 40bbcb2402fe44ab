"""NIXL's Python package under either of its names. Knows how to import and start it; nothing is transferred here."""

from __future__ import annotations

import importlib
import logging
from typing import Any

from common.errors import ConfigError


class NixlLibrary:
    """The native package under either of its names."""

    def __init__(self) -> None:
        package = _import_first(("nixl_cu12", "nixl"))
        api: Any = importlib.import_module(f"{package}._api")
        bindings: Any = importlib.import_module(f"{package}._bindings")
        logging.getLogger("nixl").setLevel(logging.WARNING)
        self.errors: tuple[type[Exception], ...] = tuple(
            value
            for value in vars(bindings).values()
            if isinstance(value, type) and issubclass(value, Exception)
        )
        self._api = api

    def agent(self, name: str) -> Any:
        """An agent that several threads may call. Raises ConfigError when UCX does not start."""
        config = self._api.nixl_agent_config(
            enable_prog_thread=False,
            backends=["UCX"],
            sync_mode=self._api.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT,
        )
        failures: tuple[type[Exception], ...] = (*self.errors, RuntimeError)
        try:
            return self._api.nixl_agent(name, config)
        except failures as error:
            raise ConfigError(f"NIXL's UCX backend does not start: {error}") from error


def _import_first(packages: tuple[str, ...]) -> str:
    why = ""
    for package in packages:
        try:
            importlib.import_module(f"{package}._bindings")
        except ImportError as error:
            why = str(error)
        else:
            return package
    raise ConfigError(f"NIXL cannot be imported ({why}); pip install 'dspark-serving[nixl]'")
