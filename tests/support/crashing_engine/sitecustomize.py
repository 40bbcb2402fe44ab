"""Makes a decode worker's engine fail at its first step. Python runs this at its start where PYTHONPATH names the folder."""

from __future__ import annotations

import importlib.machinery
import sys
from collections.abc import Sequence
from types import ModuleType

LOOP = "services.decode.loop"


class CrashingLoop:
    """Finds the engine loop's module and puts a loop in it that fails when there is work."""

    @classmethod
    def find_spec(
        cls, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != LOOP:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        assert spec is not None and spec.loader is not None
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            module.run_decode_loop = _fail_at_first_step  # type: ignore[attr-defined]

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _fail_at_first_step(engine, crossing) -> None:  # type: ignore[no-untyped-def]
    while (commands := crossing.take_commands(wait=True)) is not None:
        for command in commands:
            command(engine)
        if engine.has_work:
            raise RuntimeError("a kernel failed\nin step 1")


sys.meta_path.insert(0, CrashingLoop)
