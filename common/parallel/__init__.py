"""Meshes of ranks: who holds which part of a model, and how parts come together. Knows numbers and tensors; no model."""
