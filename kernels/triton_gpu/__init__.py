"""What the Triton kernels share. They run on NVIDIA GPUs from Ampere on (fp8: from Ada on).

Every size is a ``constexpr``, because with run-time sizes the product loaded single bytes. Floating-point
fusion is off, so that a kernel rounds like its source and the specification.

`launcher` calls jax-triton, `arithmetic` has element-wise functions, and `chunks` has rows in registers.
"""
