"""A gated activation, fused with the quantizer of its result."""
