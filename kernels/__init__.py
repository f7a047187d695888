"""The arithmetic of swjax: quantizers, quantized products, and the choice between implementations.

Import it only as ``swjax.kernels``. The package imports nothing else of swjax.
"""

if __name__ != "swjax.kernels":
    raise ImportError(
        f"this package must be imported as 'swjax.kernels', not as {__name__!r}: "
        "use `from swjax import kernels`"
    )
