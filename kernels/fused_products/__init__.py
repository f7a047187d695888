"""A quantized product with the row operation before it, forward; and after it, backward."""
