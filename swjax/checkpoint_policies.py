"""Rematerialisation policies for `jax.checkpoint` that know the residuals of swjax's layers.

`jax.checkpoint_policies.dots_saveable` does not see products inside opaque kernels and recomputes
everything; these go by name instead.
"""

import jax

# Keep the int8 (or fp8) activations that recipes with `save_quantized` need, recompute the rest.
save_quantized = jax.checkpoint_policies.save_only_these_names("swjax_x_q", "swjax_x_scale")

# Keep every linear layer's output too, so that no forward product runs twice.
save_linear = jax.checkpoint_policies.save_only_these_names("swjax_x_q", "swjax_x_scale", "swjax_y")
