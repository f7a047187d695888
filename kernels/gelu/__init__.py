"""GELU, fused with the quantizer of its result."""
