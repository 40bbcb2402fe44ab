"""Small functions with a fast version per device behind one interface. Knows arrays; no weights and no config."""

from common.model.kernels.eight_bits import EightBitProducts
from common.model.kernels.interface import Kernels, StreamMix
from common.model.kernels.select import select_kernels, select_products

__all__ = ["EightBitProducts", "Kernels", "StreamMix", "select_kernels", "select_products"]
