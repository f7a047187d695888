"""Products of two matrices: quantized, or in the dtype of the operands."""
