"""Calls jax-triton, and defines shared outputs of kernels."""

from typing import Any

import jax
import jax.numpy as jnp

from swjax.kernels import tiles


def call(*arrays: jax.Array | jax.Ref, **options: Any) -> Any:
    """Calls `jax_triton.triton_call` with floating-point fusion off.

    Args:
      *arrays: the inputs of the kernel; those that it overwrites are refs.
      **options: kernel, out_type, grid, num_warps, num_stages, and the kernel's constants. `registers` limits
        the registers per thread, so that more programs fit on a multiprocessor.

    Returns:
      The outputs, with the structure of `out_type`.
    """
    # Imported here, so that the kernels also compile without jax-triton.
    import jax_triton

    major, minor = tiles.compute_capability()
    backend_options = {"enable_fp_fusion": False, "maxnreg": options.pop("registers", None)}
    return jax_triton.triton_call(
        *arrays, backend_options=backend_options, compute_capability=10 * major + minor, **options
    )


def output(
    wanted: object, shape: tuple[int, ...], dtype: jax.typing.DTypeLike | None
) -> jax.ShapeDtypeStruct:
    """An output of a kernel; a single element if it is unused, because the kernel still needs an address."""
    return jax.ShapeDtypeStruct(shape if wanted else (1,), dtype if wanted else jnp.float32)
