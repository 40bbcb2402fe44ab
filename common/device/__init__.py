"""Devices: which there are, what they can do, how values get there and who owns their memory. Knows torch; no model."""
