"""`python -m tools.dashboards [--check]`: write the dashboards that the chart ships, or only say which have drifted."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from tools.dashboards.boards import DASHBOARDS
from tools.dashboards.grafana import dashboard_json
from tools.dashboards.panels import Dashboard

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "helm" / "dspark" / "dashboards"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 on drift")
    check = parser.parse_args().check
    fresh = {f"{board.name}.json": text_of(board) for board in DASHBOARDS}
    drifted = drift(fresh, FOLDER)
    if check:
        for name in drifted:
            print(f"{FOLDER.relative_to(ROOT) / name} has drifted; run `make dashboards`")
        return 1 if drifted else 0
    FOLDER.mkdir(parents=True, exist_ok=True)
    for path in FOLDER.glob("*.json"):
        if path.name not in fresh:
            path.unlink()
    for name, text in fresh.items():
        (FOLDER / name).write_text(text)
    print(f"dashboards: {len(drifted)} changed" if drifted else "dashboards: up to date")
    return 0


def text_of(dashboard: Dashboard) -> str:
    """A dashboard's file."""
    return json.dumps(dashboard_json(dashboard), indent=2, ensure_ascii=False) + "\n"


def drift(fresh: dict[str, str], folder: Path) -> list[str]:
    """Names of files that are missing, superfluous or not what the code gives."""
    committed = {path.name: path.read_text() for path in folder.glob("*.json")}
    return sorted(
        name for name in fresh.keys() | committed.keys() if fresh.get(name) != committed.get(name)
    )


if __name__ == "__main__":
    raise SystemExit(main())
