"""A vision transformer written with Flax alone, trained in int8 by one added line.

  python examples/int8_vit.py

needs jax, flax and optax, and takes half a minute on two CPU cores. It trains the model twice from the
same start, as it is and with int8 linear layers, to tell in which of eight directions a wave runs.
"""

import jax
import jax.numpy as jnp
from flax import nnx

import swjax.nnx
from swjax.optax import stable_adamw

STEPS, BATCH, DIRECTIONS = 60, 64, 8
RULES = {r"blocks/\d+/attention/.*": "switchback", r"blocks/\d+/mlp/layers/.*": "switchback"}


class Block(nnx.Module):
    def __init__(self, width: int, heads: int, rngs: nnx.Rngs):
        self.norm_1, self.norm_2 = (nnx.LayerNorm(width, rngs=rngs) for _ in range(2))
        self.attention = nnx.MultiHeadAttention(heads, width, decode=False, rngs=rngs)
        self.mlp = nnx.Sequential(
            nnx.Linear(width, 4 * width, rngs=rngs),
            nnx.gelu,
            nnx.Linear(4 * width, width, rngs=rngs),
        )

    def __call__(self, x):
        x = x + self.attention(self.norm_1(x))
        return x + self.mlp(self.norm_2(x))


class ViT(nnx.Module):
    def __init__(self, rngs: nnx.Rngs, *, size=32, patch=8, width=64, heads=4, layers=2, classes=8):
        self.patches = nnx.Conv(3, width, (patch, patch), strides=patch, rngs=rngs)
        positions = nnx.initializers.normal(0.02)(rngs.params(), (1, (size // patch) ** 2, width))
        self.positions = nnx.Param(positions)
        self.blocks = nnx.List(Block(width, heads, rngs) for _ in range(layers))
        self.norm, self.head = (
            nnx.LayerNorm(width, rngs=rngs),
            nnx.Linear(width, classes, rngs=rngs),
        )

    def __call__(self, images):
        x = self.patches(images)
        x = x.reshape(x.shape[0], -1, x.shape[-1]) + self.positions[...]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x).mean(axis=1))


def waves(key, count=BATCH, size=32):
    """Returns images [count, size, size, 3] of waves with noise, and their directions [count]."""
    keys = jax.random.split(key, 3)
    labels = jax.random.randint(keys[0], (count,), 0, DIRECTIONS)
    phases = jax.random.uniform(keys[1], (count, 1, 1, 3), maxval=2 * jnp.pi)
    angles = labels[:, None, None, None] * (jnp.pi / DIRECTIONS)
    y, x = jnp.meshgrid(*[jnp.arange(size, dtype=jnp.float32)] * 2, indexing="ij")
    along = x[None, :, :, None] * jnp.cos(angles) + y[None, :, :, None] * jnp.sin(angles)
    noise = 1.5 * jax.random.normal(keys[2], (count, size, size, 3))
    return jnp.sin(along + phases) + noise, labels


def train(model: nnx.Module) -> nnx.Module:
    optimizer = nnx.Optimizer(model, stable_adamw(2e-3, weight_decay=0.1), wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer, key):
        def loss(model):
            images, labels = waves(key)
            log_p = jax.nn.log_softmax(model(images))
            return -jnp.take_along_axis(log_p, labels[:, None], axis=1).mean()

        value, grads = nnx.value_and_grad(loss)(model)
        optimizer.update(model, grads)
        return value

    for number in range(STEPS):
        value = step(model, optimizer, jax.random.key(number))
        if (number + 1) % 20 == 0:
            print(f"  step {number + 1:3}  loss {value:.3f}")
    return model


@nnx.jit
def accuracy(model: nnx.Module) -> jax.Array:
    """Returns the accuracy on 512 waves that were not trained on."""
    images, labels = waves(jax.random.key(1_000_000), 512)
    return jnp.mean(jnp.argmax(model(images), axis=1) == labels)


def main() -> None:
    print("float32")
    plain = train(ViT(nnx.Rngs(0)))
    print("int8")
    model = swjax.nnx.quantize_model(ViT(nnx.Rngs(0)), RULES)  # the line
    print(swjax.nnx.describe_model(model))
    train(model)
    print(f"on unseen waves, where chance names {1 / DIRECTIONS:.1%}:")
    print(f"  trained in float32          {accuracy(plain):.1%}")
    print(f"  trained in int8             {accuracy(model):.1%}")
    swjax.nnx.restore_model(model)  # and back
    print(f"  the same, run in float32    {accuracy(model):.1%}")


if __name__ == "__main__":
    main()
