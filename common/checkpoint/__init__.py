"""Checkpoints on disk: which files, which tensors, what identifies them. Knows safetensors; no math."""
