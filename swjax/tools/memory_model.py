"""Predicts the memory of a training step from the sizes of the model, by a fit to measured runs on H200s
(concurrent kernels with quantized weight gradients: on an H100).

A block keeps a number of *widths* for its backward pass. One width is an array of one number per token and
feature. If the forward product has one scale per token and no rotation, or with LoRA, the block recomputes
the outputs of LayerNorm and GELU, which leaves 10 of 16 widths. `tests/test_plan.py` compares the prediction
with the runs of the fit and with other runs. The model was not compared with GPUs other than Hopper.
"""

from typing import Any, NamedTuple

from swjax import recipes
from swjax.linear.layer import quantizes_rows
from swjax.models.config import CLIPConfig, TowerConfig

GIB = 2**30
WIDTHS = 16  # per block that recomputes nothing
WIDTHS_RECOMPUTED = 10  # per block that recomputes LayerNorm and GELU
# Temporary arrays of the block that is running, in widths: output gradients and arrays between kernels.
WORKING_WIDTHS = {True: 16, False: 12}  # keyed by whether the block recomputes
# With concurrent kernels, whether or not a block recomputes; the arrays of running blocks are included. Keyed
# by whether the recipe quantizes wgrad.
WIDTHS_CONCURRENT = {False: 22, True: 27}
# With sharded parameters XLA delays weight gradients to overlap them with communication. The arrays that they
# read stay in memory: three quarters of the widths that recomputation saves. This is an upper bound: blocks
# did not call `swjax.checkpoint_policies.finish_gradients` then, which removes it with whole parameters.
DELAYED = 0.75


class Mesh(NamedTuple):
    """Number of devices along each mesh axis."""

    data: int = 1
    fsdp: int = 1
    tensor: int = 1

    @property
    def shards(self) -> int:
        """Number of devices that the batch is sharded over."""
        return self.data * self.fsdp

    @property
    def devices(self) -> int:
        return self.shards * self.tensor


ONE_DEVICE = Mesh()


class Memory(NamedTuple):
    """Bytes on one device at the peak of a step, by part.

    Attributes:
      state: parameters, optimizer moments and parameter averages.
      weights: the weights that blocks keep for the backward pass. Where micro-batches accumulate, it also
        covers the float32 gradients, if they need more.
      activations: the arrays that blocks keep for the backward pass.
      working: temporary arrays of the block that is running; 0 with concurrent kernels, where `activations`
        include them.
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
    gradient_bytes: int | None = None,
    concurrent: bool = False,
) -> Memory:
    """Predicts the memory of a step.

    Args:
      model: its `remat` is "none" or "full"; other values are predicted as "none", the upper bound.
      state_bytes: bytes of the whole train state.
      pairs: pairs per device and micro-batch.
      mesh: number of devices along each axis.
      accumulation: micro-batches per step.
      gradient_bytes: bytes of the float32 gradients of all trained parameters, which several micro-batches
        are summed in; by default a third of the state, as with Adam's two moments.
      concurrent: whether independent kernels run at the same time.

    Returns:
      The memory on one device.

    >>> from swjax.models import clip
    >>> vit_b16 = clip.config("vit_b16", patch_dropout=0.5)
    >>> round(predict(vit_b16, 12 * 149_620_737, 256).total / GIB, 1)  # measured on an H200: 9.1
    9.0
    """
    recompute, kept = recomputes(model), 1 if recomputes(model) else 2
    if model.lora is not None:  # layers save their inputs alone, and read frozen kernels as stored
        recompute, kept = True, 0
    widths: float = WIDTHS_RECOMPUTED if recompute else WIDTHS
    if recompute and mesh.devices > mesh.data:
        widths += DELAYED * (WIDTHS - WIDTHS_RECOMPUTED)
    working: float = WORKING_WIDTHS[recompute]
    if model.remat == "full":
        working += widths
        widths, kept = 1, kept + (model.lora is None)
    if concurrent:
        widths, working = WIDTHS_CONCURRENT[_quantizes_wgrad(model)], 0
    towers = (
        (model.vision, 1 + model.vision.kept_patches(model.patch_dropout)),
        (model.text, model.text.context_length),
    )
    number = 4 if model.dtype == "float32" else 2
    one = [pairs * tokens * tower.width * number / mesh.tensor for tower, tokens in towers]
    blocks = sum(map(_block_parameters, (model.vision, model.text))) / mesh.tensor
    gradient_bytes = state_bytes // 3 if gradient_bytes is None else gradient_bytes
    gradients = gradient_bytes / mesh.fsdp if accumulation > 1 else 0
    return Memory(
        state=state_bytes / mesh.fsdp / mesh.tensor,
        weights=kept * blocks + gradients,
        activations=widths * sum(tower.layers * size for (tower, _), size in zip(towers, one)),
        working=working * max(one),
    )


def recomputes(model: CLIPConfig) -> bool:
    """Whether the blocks recompute LayerNorm and GELU in the backward pass."""
    if not isinstance(model.recipe, str | recipes.Recipe):
        return False  # with several recipes, only some layers may recompute
    return quantizes_rows(recipes.get(model.recipe).fwd)


def _quantizes_wgrad(model: CLIPConfig) -> bool:
    if not isinstance(model.recipe, str | recipes.Recipe):
        return True  # with several recipes, some layers may
    return recipes.get(model.recipe).wgrad is not None


def most_pairs(
    model: CLIPConfig, state_bytes: int, limit: float, mesh: Mesh = ONE_DEVICE, **options: Any
) -> int:
    """The most pairs per device and micro-batch whose memory fits into `limit` bytes; 0 if none fits.

    `options` are those of `predict`.
    """

    def fits(pairs: int) -> bool:
        return predict(model, state_bytes, pairs, mesh, **options).total <= limit

    low, high = 0, 1
    while fits(high) and high < 2**20:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _block_parameters(tower: TowerConfig) -> float:
    """Number of parameters of the linear layers in all blocks."""
    return tower.layers * tower.width**2 * (4 + 2 * tower.mlp_ratio)
