"""Who may ask what only those who run the system may. Knows a key; not what is asked."""

from __future__ import annotations

import hmac
from pathlib import Path
from typing import Any

from common.errors import AdminKeyRequired, ConfigError
from common.rpc.interceptor import text

AUTHORIZATION_KEY = "authorization"
_SCHEME = "Bearer "


def bearer(key: str) -> tuple[tuple[str, str], ...]:
    """Metadata that presents a key."""
    return ((AUTHORIZATION_KEY, _SCHEME + key),)


def read_key(file: Path) -> str:
    """Raises ConfigError when the file cannot be read or holds nothing."""
    try:
        key = file.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the admin key from {file}: {error}") from None
    if not key:
        raise ConfigError(f"{file} holds no admin key")
    return key


class AdminKey:
    """The key of one process. Its file is read anew for every question, so that a key can be replaced."""

    def __init__(self, file: Path | None) -> None:
        """Without a file nobody may ask. Raises ConfigError when the file cannot be read now."""
        self._file = file
        if file is not None:
            read_key(file)

    def require(self, metadata: Any) -> None:
        """Raises AdminKeyRequired unless a call's metadata presents the key."""
        if self._file is None:
            raise AdminKeyRequired(
                "this process was given no admin key; start it with admin.key_file"
            )
        given = next((text(v) for k, v in metadata or () if k == AUTHORIZATION_KEY), "")
        expected = _SCHEME + self._current()
        if not hmac.compare_digest(given.encode(), expected.encode()):
            raise AdminKeyRequired("this needs the admin key as authorization: Bearer <key>")

    def _current(self) -> str:
        assert self._file is not None
        try:
            return read_key(self._file)
        except ConfigError as error:
            raise AdminKeyRequired(error.message) from None
