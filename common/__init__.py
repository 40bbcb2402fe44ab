"""Concepts of the serving system: no ports, no loops."""
