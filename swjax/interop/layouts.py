"""Names and layouts of CLIP parameters in other libraries.

PyTorch stores the weight of a linear layer as [out, in] and of a convolution as [out, in, h, w]. Flax stores
the kernels as [in, out] and [h, w, in, out]. open_clip concatenates q, k and v into one matrix. The other
libraries store each block separately, while swjax stacks them. Nothing else differs, so the conversions are
exact in both directions.
"""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping

import numpy as np

from swjax.data.images import MEAN, STD


@dataclasses.dataclass(frozen=True)
class WeightFormat:
    """The format in which a library stores a model.

    Attributes:
      weights, config: file names.
      names: {tensor name: swjax paths, separated by blanks, concatenated along the first axis}; "{}" stands
        for the index of a block.
      marker: a tensor name that only this layout has.
      buffers: tensors in some files that are not parameters.
      scalars: the shape of stored scalars.
    """

    weights: str
    config: str
    names: dict[str, str]
    marker: str
    buffers: frozenset[str]
    scalars: tuple[int, ...] = ()


def _both(theirs: str, ours: str, weight: str) -> dict[str, str]:
    """Names of a layer's weight, which swjax calls `weight`, and its bias."""
    return {f"{theirs}.weight": f"{ours}/{weight}", f"{theirs}.bias": f"{ours}/bias"}


def _under(theirs: str, ours: str, names: dict[str, str]) -> dict[str, str]:
    """Adds a prefix to the names on each side."""
    return {
        theirs + name: " ".join(f"{ours}/{path}" for path in paths.split())
        for name, paths in names.items()
    }


_OPEN_CLIP_BLOCK = {
    **_both("ln_1", "ln_1", "scale"),
    "attn.in_proj_weight": "attn/q/kernel attn/k/kernel attn/v/kernel",
    "attn.in_proj_bias": "attn/q/bias attn/k/bias attn/v/bias",
    **_both("attn.out_proj", "attn/out", "kernel"),
    "ls_1.gamma": "ls_1/gamma",
    **_both("ln_2", "ln_2", "scale"),
    **_both("mlp.c_fc", "mlp/fc1", "kernel"),
    **_both("mlp.c_proj", "mlp/fc2", "kernel"),
    "ls_2.gamma": "ls_2/gamma",
}

_HUGGING_FACE_BLOCK = {
    **_both("layer_norm1", "ln_1", "scale"),
    **_both("self_attn.q_proj", "attn/q", "kernel"),
    **_both("self_attn.k_proj", "attn/k", "kernel"),
    **_both("self_attn.v_proj", "attn/v", "kernel"),
    **_both("self_attn.out_proj", "attn/out", "kernel"),
    **_both("layer_norm2", "ln_2", "scale"),
    **_both("mlp.fc1", "mlp/fc1", "kernel"),
    **_both("mlp.fc2", "mlp/fc2", "kernel"),
}

_TIMM_BLOCK = {
    **_both("norm1", "ln_1", "scale"),
    "attn.qkv.weight": "attn/q/kernel attn/k/kernel attn/v/kernel",
    "attn.qkv.bias": "attn/q/bias attn/k/bias attn/v/bias",
    **_both("attn.proj", "attn/out", "kernel"),
    **_both("norm2", "ln_2", "scale"),
    **_both("mlp.fc1", "mlp/fc1", "kernel"),
    **_both("mlp.fc2", "mlp/fc2", "kernel"),
}

LAYOUTS = {
    "open_clip": WeightFormat(
        weights="open_clip_model.safetensors",
        config="open_clip_config.json",
        names={
            "visual.conv1.weight": "vision/patch_embed/kernel",
            "visual.class_embedding": "vision/class_embedding",
            "visual.positional_embedding": "vision/position_embedding",
            **_both("visual.ln_pre", "vision/ln_pre", "scale"),
            **_under("visual.transformer.resblocks.{}.", "vision/blocks", _OPEN_CLIP_BLOCK),
            **_both("visual.ln_post", "vision/ln_post", "scale"),
            "visual.proj": "vision/projection/kernel",
            "token_embedding.weight": "text/token_embedding/embedding",
            "positional_embedding": "text/position_embedding",
            **_under("transformer.resblocks.{}.", "text/blocks", _OPEN_CLIP_BLOCK),
            **_both("ln_final", "text/ln_final", "scale"),
            "text_projection": "text/projection/kernel",
            "logit_scale": "logit_scale",
            "logit_bias": "logit_bias",
        },
        marker="visual.conv1.weight",
        # OpenAI's files contain these.
        buffers=frozenset(("input_resolution", "context_length", "vocab_size")),
    ),
    "huggingface": WeightFormat(
        weights="model.safetensors",
        config="config.json",
        names={
            "vision_model.embeddings.patch_embedding.weight": "vision/patch_embed/kernel",
            "vision_model.embeddings.class_embedding": "vision/class_embedding",
            "vision_model.embeddings.position_embedding.weight": "vision/position_embedding",
            **_both("vision_model.pre_layrnorm", "vision/ln_pre", "scale"),  # sic
            **_under("vision_model.encoder.layers.{}.", "vision/blocks", _HUGGING_FACE_BLOCK),
            **_both("vision_model.post_layernorm", "vision/ln_post", "scale"),
            "visual_projection.weight": "vision/projection/kernel",
            "text_model.embeddings.token_embedding.weight": "text/token_embedding/embedding",
            "text_model.embeddings.position_embedding.weight": "text/position_embedding",
            **_under("text_model.encoder.layers.{}.", "text/blocks", _HUGGING_FACE_BLOCK),
            **_both("text_model.final_layer_norm", "text/ln_final", "scale"),
            "text_projection.weight": "text/projection/kernel",
            "logit_scale": "logit_scale",
        },
        marker="vision_model.embeddings.patch_embedding.weight",
        buffers=frozenset(
            ("vision_model.embeddings.position_ids", "text_model.embeddings.position_ids")
        ),
    ),
    "siglip": WeightFormat(
        weights="model.safetensors",
        config="config.json",
        names={
            **_both("vision_model.embeddings.patch_embedding", "vision/patch_embed", "kernel"),
            "vision_model.embeddings.position_embedding.weight": "vision/position_embedding",
            **_under("vision_model.encoder.layers.{}.", "vision/blocks", _HUGGING_FACE_BLOCK),
            **_both("vision_model.post_layernorm", "vision/ln_post", "scale"),
            "vision_model.head.probe": "vision/pool/probe",
            "vision_model.head.attention.in_proj_weight": (
                "vision/pool/q/kernel vision/pool/k/kernel vision/pool/v/kernel"
            ),
            "vision_model.head.attention.in_proj_bias": (
                "vision/pool/q/bias vision/pool/k/bias vision/pool/v/bias"
            ),
            **_both("vision_model.head.attention.out_proj", "vision/pool/out", "kernel"),
            **_both("vision_model.head.layernorm", "vision/pool/ln", "scale"),
            **_both("vision_model.head.mlp.fc1", "vision/pool/fc1", "kernel"),
            **_both("vision_model.head.mlp.fc2", "vision/pool/fc2", "kernel"),
            "text_model.embeddings.token_embedding.weight": "text/token_embedding/embedding",
            "text_model.embeddings.position_embedding.weight": "text/position_embedding",
            **_under("text_model.encoder.layers.{}.", "text/blocks", _HUGGING_FACE_BLOCK),
            **_both("text_model.final_layer_norm", "text/ln_final", "scale"),
            **_both("text_model.head", "text/projection", "kernel"),
            "logit_scale": "logit_scale",
            "logit_bias": "logit_bias",
        },
        marker="vision_model.head.probe",
        buffers=frozenset(
            ("vision_model.embeddings.position_ids", "text_model.embeddings.position_ids")
        ),
        scalars=(1,),
    ),
    "open_clip_siglip": WeightFormat(
        weights="open_clip_model.safetensors",
        config="open_clip_config.json",
        names={
            **_both("visual.trunk.patch_embed.proj", "vision/patch_embed", "kernel"),
            "visual.trunk.pos_embed": "vision/position_embedding",
            **_under("visual.trunk.blocks.{}.", "vision/blocks", _TIMM_BLOCK),
            **_both("visual.trunk.norm", "vision/ln_post", "scale"),
            "visual.trunk.attn_pool.latent": "vision/pool/probe",
            **_both("visual.trunk.attn_pool.q", "vision/pool/q", "kernel"),
            "visual.trunk.attn_pool.kv.weight": "vision/pool/k/kernel vision/pool/v/kernel",
            "visual.trunk.attn_pool.kv.bias": "vision/pool/k/bias vision/pool/v/bias",
            **_both("visual.trunk.attn_pool.proj", "vision/pool/out", "kernel"),
            **_both("visual.trunk.attn_pool.norm", "vision/pool/ln", "scale"),
            **_both("visual.trunk.attn_pool.mlp.fc1", "vision/pool/fc1", "kernel"),
            **_both("visual.trunk.attn_pool.mlp.fc2", "vision/pool/fc2", "kernel"),
            "text.token_embedding.weight": "text/token_embedding/embedding",
            "text.positional_embedding": "text/position_embedding",
            **_under("text.transformer.resblocks.{}.", "text/blocks", _OPEN_CLIP_BLOCK),
            **_both("text.ln_final", "text/ln_final", "scale"),
            **_both("text.text_projection", "text/projection", "kernel"),
            "logit_scale": "logit_scale",
            "logit_bias": "logit_bias",
        },
        marker="visual.trunk.attn_pool.latent",
        buffers=frozenset(),
    ),
}


@dataclasses.dataclass(frozen=True)
class Tensor:
    """One tensor of a file.

    Attributes:
      name: name in the file.
      paths: paths of the swjax parameters that it contains.
      block: index of the block in the swjax stacks, or None if they are not stacked.
      axes: permutation from swjax's axes to the file's axes.
      shape: shape in the file.
    """

    name: str
    paths: tuple[str, ...]
    block: int | None
    axes: tuple[int, ...]
    shape: tuple[int, ...]

    def pack(self, parameters: Mapping[str, np.ndarray]) -> np.ndarray:
        """Builds the tensor from swjax's parameters, given by path."""
        parts = [parameters[path][self._place].transpose(self.axes) for path in self.paths]
        joined = parts[0] if len(parts) == 1 else np.concatenate(parts)
        return np.asarray(joined.reshape(self.shape), order="C")

    def unpack(self, value: np.ndarray, parameters: Mapping[str, np.ndarray]) -> None:
        """Copies the tensor into swjax's parameters."""
        parts = [value] if len(self.paths) == 1 else np.split(value, len(self.paths))
        inverse = [self.axes.index(axis) for axis in range(len(self.axes))]
        for path, part in zip(self.paths, parts, strict=True):
            place = parameters[path][self._place]
            # Scalars may be [1] in a file, and positions may have a leading axis.
            theirs = part.reshape([place.shape[axis] for axis in self.axes])
            parameters[path][self._place] = theirs.transpose(inverse)

    @property
    def _place(self):
        return ... if self.block is None else self.block


def tensors(layout: WeightFormat, shapes: Mapping[str, tuple[int, ...]]) -> Iterator[Tensor]:
    """Lists the tensors of a file in this layout.

    Args:
      layout: layout of the file.
      shapes: {swjax path: shape} of the parameters.

    Raises:
      ValueError: the layout has no name for a parameter.
    """
    named = {path for paths in layout.names.values() for path in paths.split()}
    for path in shapes:
        if path not in named:
            raise ValueError(
                f"a file {layout.weights} has no name for the parameter {path!r}: "
                f"use another layout, or a model without it"
            )
    for name, joined in layout.names.items():
        paths = tuple(joined.split())
        if paths[0] not in shapes:  # belongs to an option that this model does not use
            continue
        ours = shapes[paths[0]]
        if "{}" not in name:
            yield _tensor(name, paths, None, ours, layout.scalars)
            continue
        for block in range(ours[0]):
            yield _tensor(name.format(block), paths, block, ours[1:])


def for_their_images(
    parameters: Mapping[str, np.ndarray], mean: Iterable[float], std: Iterable[float]
) -> dict[str, np.ndarray]:
    """Converts parameters to models whose images are normalized by another mean and std than `MEAN`, `STD`.

    The patch embedding absorbs the difference, ``(p - mean) / std = a (p - MEAN) / STD + b`` for each color,
    so the output of the model is unchanged. If the patch embedding has no bias, the constant part is added to
    the position embeddings of the patches.

    Args:
      parameters: {path: array}.
      mean, std: normalization of the images for the converted model.
    """
    a, b = _affine(mean, std)
    # From STD x + MEAN = std y + mean: the kernel receives y instead of x = y / a - b / a.
    return _renormalized(parameters, 1 / a, -b / a)


def for_our_images(
    parameters: Mapping[str, np.ndarray], mean: Iterable[float], std: Iterable[float]
) -> dict[str, np.ndarray]:
    """Inverts `for_their_images`: converts parameters to images normalized by `MEAN` and `STD`."""
    return _renormalized(parameters, *_affine(mean, std))


def _affine(mean: Iterable[float], std: Iterable[float]) -> tuple[np.ndarray, np.ndarray]:
    """(a, b) such that a x + b has normalization mean and std if x has `MEAN` and `STD`."""
    theirs, ours = np.array([[*mean], [*std]]), np.array([MEAN, STD])
    return ours[1] / theirs[1], (ours[0] - theirs[0]) / theirs[1]


def _renormalized(
    parameters: Mapping[str, np.ndarray], scale: np.ndarray, shift: np.ndarray
) -> dict[str, np.ndarray]:
    """Parameters that compute from images x what the given ones compute from scale x + shift, by color."""
    if (scale == 1).all() and (shift == 0).all():
        return dict(parameters)
    name = "vision/patch_embed/kernel"
    kernel = parameters[name].astype(np.float64)
    constant = np.einsum("hwcd,c->d", kernel, shift)
    changed = {name: kernel * scale[:, None]}
    if "vision/patch_embed/bias" in parameters:
        changed["vision/patch_embed/bias"] = parameters["vision/patch_embed/bias"] + constant
    else:
        positions = parameters["vision/position_embedding"].astype(np.float64)
        positions[1:] += constant  # the first one is that of the class token
        changed["vision/position_embedding"] = positions
    return dict(parameters) | {name: x.astype(np.float32) for name, x in changed.items()}


def _tensor(
    name: str,
    paths: tuple[str, ...],
    block: int | None,
    ours: tuple[int, ...],
    scalars: tuple[int, ...] = (),
) -> Tensor:
    axes = tuple(range(len(ours)))
    if len(ours) == 4:
        axes = (3, 2, 0, 1)
    elif name.endswith("weight") and len(ours) == 2 and paths[0].endswith("kernel"):
        axes = (1, 0)
    shape = [ours[axis] for axis in axes]
    if len(paths) > 1:
        shape[0] *= len(paths)
    if name.endswith("pos_embed"):
        shape.insert(0, 1)
    return Tensor(name, paths, block, axes, tuple(shape) if ours else scalars)
