"""One step of work over flattened rows: requests, schedule, runner. Knows tokens and pages; never sees the wire."""
