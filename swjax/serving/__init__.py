"""Models for inference: 8-bit weights, weight files and exported programs."""

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
