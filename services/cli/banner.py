"""What is printed when a router answers: how to talk to it. Knows an address; opens nothing."""

from __future__ import annotations


def ready_banner(address: str, model: str, seconds: float) -> str:
    """Says where and after how long, with lines to copy."""
    return f"""
ready: {model} at {address} after {seconds:.1f} s

  dspark generate --endpoint {address} --chat "What is the capital of France?"

  python -c '
import dspark
with dspark.Client("{address}") as client:
    print(client.generate("def add(a, b):", stop=dspark.StopParams(max_tokens=32)).text)'

  grpcurl -plaintext -d '{{"text": "def add(a, b):", "stop": {{"max_tokens": 32}}}}' \\
    {address} dspark.v1.InferenceService/Generate

Ctrl-C stops everything.
"""
