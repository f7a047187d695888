"""Weight gradients in 16 bits, of one layer or of several that share their input."""
