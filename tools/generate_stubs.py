"""Generates the Python stubs of the protos. Knows files and protoc; not what the messages mean.

Run by `make stubs` and `make check-stubs` with the interpreter of the venv that tools/stubs-requirements.txt describes.
"""

from __future__ import annotations

import argparse
import filecmp
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PROTOS = ROOT / "protos"
STUBS = ROOT / "sdk" / "dspark" / "v1"


def main() -> int:
    """Write the stubs, or with --check only say whether the committed ones are what the protos give."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 on drift")
    check = parser.parse_args().check
    with tempfile.TemporaryDirectory() as folder:
        generate(Path(folder))
        fresh = Path(folder) / "dspark" / "v1"
        drifted = compare(fresh, STUBS)
        if check:
            for name in drifted:
                print(f"{STUBS.relative_to(ROOT) / name} differs from the protos; run `make stubs`")
            return 1 if drifted else 0
        replace(fresh, STUBS)
    print(f"stubs: {len(drifted)} changed" if drifted else "stubs: up to date")
    return 0


def generate(into: Path) -> None:
    """Run protoc over every proto; service stubs only for files that hold a service."""
    files = sorted(str(path.relative_to(PROTOS)) for path in PROTOS.rglob("*.proto"))
    services = [name for name in files if name.endswith("_service.proto")]
    plugin = Path(sys.executable).with_name("protoc-gen-mypy_grpc")
    protoc(files, f"--python_out={into}", f"--pyi_out={into}")
    protoc(
        services,
        f"--plugin=protoc-gen-mypy_grpc={plugin}",
        f"--grpc_python_out={into}",
        f"--mypy_grpc_out=quiet:{into}",
    )


def protoc(files: list[str], *options: str) -> None:
    command = [sys.executable, "-W", "ignore", "-m", "grpc_tools.protoc", f"-I{PROTOS}"]
    subprocess.run([*command, *options, *files], check=True, timeout=120)


def compare(fresh: Path, committed: Path) -> list[str]:
    """Names of stubs that are missing, superfluous or different."""
    names = stub_names(fresh) | stub_names(committed)
    _, different, missing = filecmp.cmpfiles(fresh, committed, names, shallow=False)
    return sorted([*different, *missing])


def replace(fresh: Path, committed: Path) -> None:
    for name in stub_names(committed) - stub_names(fresh):
        (committed / name).unlink()
    for name in stub_names(fresh):
        shutil.copyfile(fresh / name, committed / name)


def stub_names(folder: Path) -> set[str]:
    return {path.name for path in folder.glob("*_pb2*.py*")}


if __name__ == "__main__":
    raise SystemExit(main())
