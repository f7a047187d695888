"""FSDP of the models of language_models_flax.py: one mesh axis shards tokens, weights and their moments.

The mesh is explicit. Layers of swjax read the sharding from the types of x and w: each gathers its weight
quantized, once for the forward and once for the backward pass, and reduce-scatters its gradient. Flax's
layers get a product that does the same with weights in bfloat16. The embedding and the head are gathered once
a step, in bfloat16, in every arm. Use the functions below inside of `jax.set_mesh`.
"""

import dataclasses
from functools import partial
from typing import Any

import jax
from flax import nnx
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import swjax.nnx
from benchmarks.language_models_flax import DTYPE, FusedBlock, LanguageModel, rotation
from benchmarks.language_models_shapes import Shape, chunk
from swjax.losses import linear_cross_entropy
from swjax.models.embeddings import lookup

AXIS = "fsdp"
# Each device runs the function on its part of every array, split along the first axis.
on_each = partial(jax.shard_map, in_specs=P(AXIS), out_specs=P(AXIS), check_vma=False)


def make_mesh(devices: int) -> Mesh:
    if devices > len(jax.devices()):
        raise ValueError(
            f"--mesh fsdp={devices} needs {devices} devices, {len(jax.devices())} are here"
        )
    kinds = (AxisType.Explicit,)
    return jax.make_mesh((devices,), (AXIS,), kinds, devices=jax.devices()[:devices])


def placed(tree: Any, mesh: Mesh) -> Any:
    """Adds shardings to `jax.ShapeDtypeStruct`s: matrices by their first axis, vectors replicated."""

    def place(leaf):
        split = leaf.ndim > 1 and leaf.shape[0] % mesh.size == 0
        sharding = NamedSharding(mesh, P(AXIS) if split else P())
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    return jax.tree.map(place, tree)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def gathered(reduce_dtype: str, w: jax.Array) -> jax.Array:
    """The w of all devices, inside of `on_each`; its gradient is reduce-scattered in `reduce_dtype`."""
    return lax.all_gather(w, AXIS, tiled=True)


def _scattered(reduce_dtype, _, dw):
    total = lax.psum_scatter(dw.astype(reduce_dtype), AXIS, tiled=True)
    return (total.astype(dw.dtype),)


gathered.defvjp(lambda dtype, w: (gathered(dtype, w), None), _scattered)


@dataclasses.dataclass(frozen=True)
class GatheredProduct:
    """The product of Flax's layers: `jax.lax.dot_general` with a sharded weight.

    The backward pass gathers the weight again, as swjax and PyTorch's FSDP do, so that no device holds the
    weights of all layers at once.
    """

    reduce_dtype: str

    def __call__(self, x: jax.Array, w: jax.Array, dimension_numbers, **_) -> jax.Array:
        product = lambda x, w: lax.dot_general(x, gathered(self.reduce_dtype, w), dimension_numbers)
        return on_each(jax.checkpoint(product))(x, w)


def distribute(blocks: nnx.Module, reduce_dtype: str) -> nnx.Module:
    """Sets the dtype in which devices sum the gradients of matrices, and their order, in place."""
    layout = swjax.Layout(reduce_dtype=reduce_dtype)  # an explicit mesh shows the shardings
    blocks.finish = True
    for _, module in nnx.iter_modules(blocks):
        if isinstance(module, FusedBlock):
            module.layout = layout
        elif isinstance(module, nnx.Linear):
            product = swjax.nnx.product_of(module)
            module.dot_general = (
                GatheredProduct(reduce_dtype)
                if product is None
                else dataclasses.replace(product, layout=layout)
            )
    return blocks


class ShardedLanguageModel(LanguageModel):
    """`LanguageModel` on a mesh; devices have equal numbers of tokens."""

    def __init__(self, blocks: nnx.Module, shape: Shape, reduce_dtype: str):
        super().__init__(distribute(blocks, reduce_dtype), shape)
        self.reduce_dtype = reduce_dtype

    def __call__(self, tokens: jax.Array) -> jax.Array:
        gather = on_each(lambda w: gathered(self.reduce_dtype, w.astype(DTYPE))[None])
        look_up = on_each(lambda table, tokens: lookup(table[0], tokens, DTYPE.dtype.name))
        table = gather(self.embedding[...])  # [devices, v, d]: each device has a copy
        x = look_up(table, tokens[:, :-1])
        x = self.norm(self.blocks(x, rotation(x.shape[1], self.head_width)))

        def loss(x, head, labels):
            head = head[0].T if self.head is None else head[0]
            options = {"chunk": chunk(len(x)), "logits_dtype": DTYPE}
            return linear_cross_entropy(x, head, labels, **options)[None]

        head = table if self.head is None else gather(self.head[...])
        return on_each(loss)(x, head, tokens[:, 1:]).mean()
