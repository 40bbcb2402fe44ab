"""Small functions with a fast version per device behind one interface. Knows arrays; no weights and no config."""

from common.model.kernels.interface import Kernels, select_kernels

__all__ = ["Kernels", "select_kernels"]
