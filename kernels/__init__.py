"""The arithmetic of swjax: quantizers, quantized products, and the choice between implementations.

Import it only as ``swjax.kernels``. The package imports nothing else of swjax.

- `reference`: the specification, in jax.numpy. `triton_gpu`, `mosaic_gpu`: the kernels.
- `dispatch`: chooses the implementation of an operation. `tiles`: tile sizes. `availability`: the reasons
  why an implementation cannot run.
- `saved_programs`: saves lowered kernels on disk.
"""

if __name__ != "swjax.kernels":
    raise ImportError(
        f"this package must be imported as 'swjax.kernels', not as {__name__!r}: "
        "use `from swjax import kernels`"
    )
