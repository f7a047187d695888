"""What the Pallas kernels for Hopper share: the `pipeline` of products, and `slices` of weight gradients."""
