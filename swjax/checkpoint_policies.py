"""Policies for `jax.checkpoint` that select by name the arrays that swjax's layers save.

`jax.checkpoint_policies.dots_saveable` does not recognize products inside opaque kernels and recomputes all
of them; these policies select by name. Each policy saves the quantized weights, so that recomputing a layer
does not quantize its weight again. They take one byte per parameter, and two on GPUs.

JAX's own policies work as well; docs/transformations.md lists them.
"""

import jax

_WEIGHTS = ("swjax_w_q", "swjax_w_scale")
_INPUTS = ("swjax_x_q", "swjax_x_scale")

# Recompute everything else.
save_weights = jax.checkpoint_policies.save_only_these_names(*_WEIGHTS)

# Save the int8 or fp8 activations of recipes with `save_quantized`, recompute the rest.
save_quantized = jax.checkpoint_policies.save_only_these_names(*_WEIGHTS, *_INPUTS)

# Save every linear layer's output, so that no forward product runs twice; and the scale of each token's
# input, which int8 weight gradients read.
save_outputs = jax.checkpoint_policies.save_only_these_names(*_WEIGHTS, "swjax_x_scale", "swjax_y")

# Save the quantized activations and the outputs.
save_linear = jax.checkpoint_policies.save_only_these_names(*_WEIGHTS, *_INPUTS, "swjax_y")
