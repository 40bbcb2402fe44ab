"""All dashboards, in the order in which one looks at them."""

from __future__ import annotations

from tools.dashboards.capacity import CAPACITY
from tools.dashboards.decode import DECODE
from tools.dashboards.overview import OVERVIEW
from tools.dashboards.panels import Dashboard
from tools.dashboards.prefill import PREFILL

DASHBOARDS: tuple[Dashboard, ...] = (OVERVIEW, PREFILL, DECODE, CAPACITY)
