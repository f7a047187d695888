"""Rematerialisation policies for `jax.checkpoint` that know the residuals of swjax's layers.

`jax.checkpoint_policies.dots_saveable` does not see products inside opaque kernels and recomputes
everything; these go by name instead. All of them keep the quantized weights, one byte a parameter (on GPUs
two): none is quantized again where its layer is recomputed.
"""

import jax

_WEIGHTS = ("swjax_w_q", "swjax_w_scale")
_INPUTS = ("swjax_x_q", "swjax_x_scale")

# Recompute everything else.
save_weights = jax.checkpoint_policies.save_only_these_names(*_WEIGHTS)

# Keep the int8 (or fp8) activations that recipes with `save_quantized` need, recompute the rest.
save_quantized = jax.checkpoint_policies.save_only_these_names(*_WEIGHTS, *_INPUTS)

# Keep every linear layer's output, so that no forward product runs twice.
save_outputs = jax.checkpoint_policies.save_only_these_names(*_WEIGHTS, "swjax_y")

# Both of them.
save_linear = jax.checkpoint_policies.save_only_these_names(*_WEIGHTS, *_INPUTS, "swjax_y")
