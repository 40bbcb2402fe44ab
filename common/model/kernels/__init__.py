"""Small functions with a fast version per device behind one interface. Knows arrays; no weights and no config."""

from common.model.kernels.interface import Kernels, StreamMix
from common.model.kernels.select import select_kernels

__all__ = ["Kernels", "StreamMix", "select_kernels"]
