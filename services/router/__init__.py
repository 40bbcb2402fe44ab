"""The router: owns every request's context, places it on workers and commits what they verify. Runs without torch."""

from services.router.app import serve
from services.router.config import QueueConfig, RouterConfig, WorkerConfig

__all__ = ["QueueConfig", "RouterConfig", "WorkerConfig", "serve"]
