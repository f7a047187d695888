"""Weight gradients in 8 bits, of rotated tokens with a scale for each column and block of tokens."""
