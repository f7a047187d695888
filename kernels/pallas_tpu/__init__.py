"""What the kernels for TPUs in Pallas share."""
