"""Rotations of neighbours along a contraction, fused with the quantizer of rows."""
