"""Drafting, verification and its budget as pure functions. Knows rows and draft positions; knows no cache and no model."""
