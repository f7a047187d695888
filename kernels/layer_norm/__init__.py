"""LayerNorm, fused with the quantizer of its result."""
