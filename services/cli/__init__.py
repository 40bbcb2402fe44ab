"""The `dspark` command. The only room that sees more than one service."""

from services.cli.main import main

__all__ = ["main"]
