"""What becomes of matrices that a checkpoint stores quantised. Knows the choices; neither formats nor arithmetic."""

from __future__ import annotations

import enum


class Quantization(enum.Enum):
    """`engine.quantization`."""

    DEQUANTIZE = "dequantize"
    """Values on load."""
    NATIVE = "native"
    """They stay as they are stored; values exist while a product is computed, whose result is the same."""
    W8A8 = "w8a8"
    """The same, but matrices of 8 bits multiply activations that are quantised to 8 bits as well."""

    @property
    def keeps_stored(self) -> bool:
        return self is not Quantization.DEQUANTIZE
