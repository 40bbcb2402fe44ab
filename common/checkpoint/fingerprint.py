"""What identifies a checkpoint. Reads all of its bytes once."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from common.checkpoint.headers import shard_paths


def fingerprint(checkpoint_dir: Path) -> str:
    """SHA-256 over config.json's values and every shard's header and contents, hexadecimal.

    Two workers whose fingerprints agree hold the same model; file names, formatting and dates do not count.
    """
    digest = hashlib.sha256()
    config = json.loads((checkpoint_dir / "config.json").read_text(encoding="utf-8"))
    digest.update(json.dumps(config, sort_keys=True).encode())
    for path in shard_paths(checkpoint_dir):
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()
