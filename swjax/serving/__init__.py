"""Models to serve: weights in 8 bits, files of them, and exported programs."""

from swjax.serving.models import (
    QuantizedKernel,
    export,
    load,
    prequantize,
    prequantize_variables,
    read_metadata,
    save,
    weights,
)

__all__ = [
    "QuantizedKernel",
    "export",
    "load",
    "prequantize",
    "prequantize_variables",
    "read_metadata",
    "save",
    "weights",
]
