"""One question over HTTP."""

from __future__ import annotations

import http.client


def get(port: int, path: str) -> tuple[int, str]:
    """Status and body of an answer of this machine."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()
