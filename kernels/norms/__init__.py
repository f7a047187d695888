"""LayerNorm and RMSNorm, fused with the quantizer of their results."""
