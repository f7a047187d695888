"""The arithmetic of swjax: quantizers, quantized products, and the choice between implementations.

Import it only as ``swjax.kernels``. The package imports nothing else of swjax.

A folder for each operation: its specification in jax.numpy (`reference`), which is also the XLA path, its
kernels (`triton`, `mosaic_gpu`, `pallas_tpu`) and their tile sizes (`tiles`).

- `dispatch`: the table of operations; chooses the implementation. `availability`: why one cannot run.
- `targets`: the device that a program is for. `chips`: the peaks and the memory of each chip.
- `formats`: the 8-bit formats and exact arithmetic. `reference`: all specifications under one name.
- `tiles`: the GPU and its tuned table. `saved_programs`: saves lowered kernels on disk.
- `triton_gpu`, `mosaic_gpu`, `pallas_tpu`: what the kernels in one language share.
"""

if __name__ != "swjax.kernels":
    raise ImportError(
        f"this package must be imported as 'swjax.kernels', not as {__name__!r}: "
        "use `from swjax import kernels`; if another library imports it, as transformers does, start "
        "Python in another folder than the checkout"
    )
