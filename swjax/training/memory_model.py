"""The memory of a training step, predicted from the sizes of a model: a fit to runs recorded on H200s.

A block keeps a number of *widths* for its backward pass: arrays of one number for each token and feature.
Where the forward product has one scale for each token, LayerNorm's and GELU's outputs are recomputed, and 10
widths remain of 16. `tests/test_plan.py` compares it with the recorded runs
that it was fitted to, and with others. GPUs other than Hopper were not measured.
"""

from typing import NamedTuple

from swjax import recipes
from swjax.models.config import CLIPConfig, TowerConfig

GIB = 2**30
WIDTHS = 16  # of a block that recomputes nothing
WIDTHS_RECOMPUTED = 10  # where LayerNorm and GELU are recomputed
# Arrays of the block at work, in widths: gradients of its outputs, and what passes between kernels.
WORKING_WIDTHS = {True: 16, False: 12}  # by whether it recomputes
# On several devices XLA delays weight gradients to overlap them with communication, and keeps what they
# read: three quarters of the widths that were to be recomputed.
DELAYED = 0.75


class Mesh(NamedTuple):
    """Devices along each axis."""

    data: int = 1
    fsdp: int = 1
    tensor: int = 1

    @property
    def shards(self) -> int:
        """Devices that the batch is sharded over."""
        return self.data * self.fsdp

    @property
    def devices(self) -> int:
        return self.shards * self.tensor


ONE_DEVICE = Mesh()


class Memory(NamedTuple):
    """Bytes of one device at the peak of a step.

    Attributes:
      state: parameters, moments, averages.
      weights: what blocks keep of their weights, and at most this much of float32 gradients where
        micro-batches accumulate.
      activations: what blocks keep for the backward pass.
      working: of the block at work.
    """

    state: float
    weights: float
    activations: float
    working: float

    @property
    def total(self) -> float:
        return sum(self)


def predict(
    model: CLIPConfig,
    state_bytes: int,
    pairs: int,
    mesh: Mesh = ONE_DEVICE,
    *,
    accumulation: int = 1,
) -> Memory:
    """The memory of a step.

    Args:
      model: its `remat` is "none" or "full"; other values are predicted as "none", the upper bound.
      state_bytes: of the whole train state.
      pairs: of a device and micro-batch.
      mesh: devices along each axis.
      accumulation: micro-batches of a step.

    >>> from swjax.models import clip
    >>> vit_b16 = clip.config("vit_b16", patch_dropout=0.5)
    >>> round(predict(vit_b16, 12 * 149_620_737, 256).total / GIB, 1)  # an H200 used 9.1
    9.0
    """
    recompute, kept = recomputes(model), 1 if recomputes(model) else 2
    widths: float = WIDTHS_RECOMPUTED if recompute else WIDTHS
    if recompute and mesh.devices > 1:
        widths += DELAYED * (WIDTHS - WIDTHS_RECOMPUTED)
    working: float = WORKING_WIDTHS[recompute]
    if model.remat == "full":
        working += widths
        widths, kept = 1, kept + 1
    towers = (
        (model.vision, 1 + model.vision.kept_patches(model.patch_dropout)),
        (model.text, model.text.context_length),
    )
    number = 4 if model.dtype == "float32" else 2
    one = [pairs * tokens * tower.width * number / mesh.tensor for tower, tokens in towers]
    blocks = sum(map(_block_parameters, (model.vision, model.text))) / mesh.tensor
    gradients = state_bytes / 3 / mesh.fsdp if accumulation > 1 else 0
    return Memory(
        state=state_bytes / mesh.fsdp / mesh.tensor,
        weights=kept * blocks + gradients,
        activations=widths * sum(tower.layers * size for (tower, _), size in zip(towers, one)),
        working=working * max(one),
    )


def recomputes(model: CLIPConfig) -> bool:
    """Whether the blocks recompute LayerNorm and GELU in the backward pass."""
    if not isinstance(model.recipe, str | recipes.Recipe):
        return False  # several recipes: those of some layers may
    fwd = recipes.get(model.recipe).fwd
    return fwd is not None and fwd.lhs.scope == "row" and not fwd.outlier_threshold


def most_pairs(
    model: CLIPConfig,
    state_bytes: int,
    limit: float,
    mesh: Mesh = ONE_DEVICE,
    *,
    accumulation: int = 1,
) -> int:
    """The most pairs of a device and micro-batch whose predicted memory is within `limit` bytes; 0: none."""

    def fits(pairs: int) -> bool:
        return predict(model, state_bytes, pairs, mesh, accumulation=accumulation).total <= limit

    low, high = 0, 1
    while fits(high) and high < 2**20:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _block_parameters(tower: TowerConfig) -> float:
    """Of the blocks' linear layers."""
    return tower.layers * tower.width**2 * (4 + 2 * tower.mlp_ratio)
