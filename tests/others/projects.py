"""Models of published projects, small, unedited and in float32, with the environment that each needs."""

import dataclasses
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AxisType

from swjax import KEPT_IN_LLMS

_JAX = "jax==0.12.0.1 flax==0.12.12 opt_einsum optax "

# {environment: the arguments of pip install, one call after the other}
ENVIRONMENTS = {
    "tunix": [_JAX + "google-tunix==0.1.7 qwix==0.1.8"],
    "linen": [
        _JAX + "transformers==4.57.1 diffusers==0.35.2 Pillow dm-haiku==0.0.17 penzai==0.2.5"
    ],
    # Its extras want CUDA or TPUs; this is what a model needs.
    "maxtext": [
        _JAX + "maxtext==0.2.5 pathwaysutils tokamax drjax transformers grain Pillow tiktoken "
        "sentencepiece sympy aqtp qwix omegaconf ml_collections orbax-checkpoint jinja2"
    ],
    "levanter": [
        "opt_einsum marin-levanter==0.2.227.dev40316220070 marin-haliax==0.2.227.dev40316220070"
    ],
    # A model needs a small part of what they require; pip searches the rest for half an hour.
    "gemma": [
        _JAX + "orbax-checkpoint etils[epy,epath,enp,ecolab] treescope jaxtyping typeguard einops "
        "sentencepiece tqdm Pillow ml_collections absl-py immutabledict clu tensorflow tensorboard "
        "pandas grain tensorflow_datasets chex dialog",
        "--no-deps gemma==4.0.1 kauldron==1.4.4",
    ],
}

TOKENS = jax.random.randint(jax.random.key(0), (4, 16), 0, 64)


class Case(NamedTuple):
    """A model as a function.

    Attributes:
      apply: a function of the parameters and the inputs; it returns logits or other floats.
      params: the parameters, with the structure of the project.
      inputs: arrays; the first are tokens [b, t] of a language model, or floats.
      rules: of `swjax.quantized`.
      mesh: 4 x 2 devices, if the model must know them.
    """

    apply: Callable[..., jax.Array]
    params: Any
    inputs: tuple[jax.Array, ...]
    rules: str | Mapping[str, str] = "llm"
    mesh: jax.sharding.Mesh | None = None


class Project(NamedTuple):
    """How a project's model is made: in which environment, and of which package of it."""

    make: Callable[[], Case]
    environment: str
    package: str


SIZES = dict(num_layers=2, vocab_size=64, embed_dim=32, hidden_dim=64, num_heads=4, head_dim=8)
SIZES |= dict(num_kv_heads=2)
# With one scale for each weight, the worst gradients of Gemma 3 differ by 5.5 and 6.3%, and that of
# Levanter's Llama by 5.2%.
SCALE_OF_COLUMNS = {KEPT_IN_LLMS: "standard", ".*": "switchback_q"}


# --- tunix --------------------------------------------------------------------------------------------


def _tunix(model) -> Case:
    from flax import nnx

    graph, state = nnx.split(model)
    positions = jnp.broadcast_to(jnp.arange(TOKENS.shape[1]), TOKENS.shape)
    mask = jnp.tril(jnp.ones((TOKENS.shape[1],) * 2, bool))[None].repeat(len(TOKENS), 0)

    def apply(state, tokens):
        logits, _ = nnx.merge(graph, state)(tokens, positions, None, mask)
        return logits

    return Case(apply, state, (TOKENS,))


def _tunix_llama():
    from flax import nnx
    from tunix.models.llama3 import model

    config = model.ModelConfig(**SIZES, rope_theta=10_000, norm_eps=1e-5, **_float32(model))
    return model.Llama3(config, rngs=nnx.Rngs(0))


def _float32(model) -> dict:
    fields = {field.name for field in dataclasses.fields(model.ModelConfig)}
    return {name: jnp.float32 for name in ("dtype", "param_dtype") if name in fields}


def tunix_llama() -> Case:
    return _tunix(_tunix_llama())


def tunix_lora() -> Case:
    """Qwix's LoRA, as tunix applies it."""
    import qwix

    provider = qwix.LoraProvider(module_path=".*q_proj|.*kv_proj|.*_proj", rank=4, alpha=8.0)
    model = _tunix_llama()
    return _tunix(qwix.apply_lora_to_model(model, provider, **model.get_model_input()))


def tunix_qwen3(**experts) -> Case:
    from flax import nnx
    from tunix.models.qwen3 import model

    sizes = SIZES | experts
    config = model.ModelConfig(**sizes, rope_theta=10_000, norm_eps=1e-6, **_float32(model))
    return _tunix(model.Qwen3(config, rngs=nnx.Rngs(0)))


def tunix_moe() -> Case:
    return tunix_qwen3(num_experts=4, num_experts_per_tok=2)


def tunix_gemma3() -> Case:
    from flax import nnx
    from tunix.models.gemma3 import model

    sizes = SIZES | {"num_embed": SIZES["vocab_size"], "num_kv_heads": 1} | _float32(model)
    del sizes["vocab_size"]
    config = dataclasses.replace(model.ModelConfig.gemma3_1b_pt(), **sizes)
    return _tunix(model.Gemma3(config, rngs=nnx.Rngs(0)))._replace(rules=SCALE_OF_COLUMNS)


# --- Hugging Face's models in Linen -------------------------------------------------------------------


def _transformer(kind: str, **sizes) -> Case:
    import transformers

    config = getattr(transformers, f"{kind}Config")(vocab_size=64, **sizes)
    model = getattr(transformers, f"Flax{kind}ForCausalLM")(config, seed=0)
    return Case(lambda params, tokens: model(tokens, params=params).logits, model.params, (TOKENS,))


LLAMA = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4)
LLAMA |= dict(num_key_value_heads=2, max_position_embeddings=32)


def huggingface_llama() -> Case:
    return _transformer("Llama", **LLAMA)


def huggingface_mistral() -> Case:
    return _transformer("Mistral", **LLAMA)


def huggingface_gemma() -> Case:
    return _transformer("Gemma", **LLAMA, head_dim=8)


def huggingface_unet() -> Case:
    """The denoiser of Stable Diffusion."""
    import diffusers

    unet = diffusers.FlaxUNet2DConditionModel(
        **dict(
            sample_size=8, block_out_channels=(32, 64), layers_per_block=1, attention_head_dim=4
        ),
        **dict(down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"), cross_attention_dim=32),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
    )
    images = jax.random.normal(jax.random.key(2), (4, 4, 8, 8))
    text = jax.random.normal(jax.random.key(1), (4, 6, 32))
    times = jnp.arange(4.0)

    def apply(params, images, times, text):
        return unet.apply({"params": params}, images, times, text).sample

    params = unet.init_weights(jax.random.key(0))
    return Case(apply, params, (images, times, text), {".*kernel": "switchback"})


# --- Gemma's own library --------------------------------------------------------------------------------


def gemma_library() -> Case:
    """Gemma 3 in Linen, whose layers are einsums of its own."""
    from gemma import gm

    model = gm.nn.Gemma3_1B(dtype=jnp.float32)
    sizes = dict(num_embed=64, embed_dim=32, hidden_dim=64, num_heads=4, head_dim=8)
    types = model.config.attention_types[4:6]  # local and global
    config = dataclasses.replace(model.config, **sizes, num_kv_heads=2, attention_types=types)
    model = gm.nn.Gemma3_1B(config=config, dtype=jnp.float32)
    params = model.init(jax.random.key(0), TOKENS)["params"]
    apply = lambda params, tokens: model.apply({"params": params}, tokens).logits
    return Case(apply, params, (TOKENS,), SCALE_OF_COLUMNS)


# --- MaxText ------------------------------------------------------------------------------------------


def maxtext_llama(decoder: str = "llama2", parallel: str = "tensor", **options) -> Case:
    """Layers in a scan with remat, and sharding constraints on MaxText's mesh of 4 x 2 devices."""
    import maxtext.configs
    from flax.core import meta
    from maxtext.configs import pyconfig
    from maxtext.models import models

    sizes = dict(base_emb_dim=32, base_mlp_dim=64, base_num_query_heads=4, base_num_kv_heads=2)
    sizes |= dict(head_dim=8, base_num_decoder_layers=2, vocab_size=64, max_target_length=16)
    config = pyconfig.initialize(
        ["", f"{maxtext.configs.__path__[0]}/base.yml"],
        **dict(run_name="", base_output_directory="", hardware="cpu", log_config=False),
        **dict(decoder_block=decoder, attention="dot_product", enable_checkpointing=False),
        **dict(dtype="float32", weight_dtype="float32", skip_jax_distributed_system=True),
        **dict(override_model_config=True, per_device_batch_size=0.5, **sizes),
        **options,
    )
    counts = [{"fsdp": 4, parallel: 2}.get(axis, 1) for axis in config.mesh_axes]
    mesh = jax.make_mesh(counts, tuple(config.mesh_axes), axis_types=(AxisType.Auto,) * len(counts))
    model = models.transformer_as_linen(config, mesh, None)
    positions = jnp.broadcast_to(jnp.arange(TOKENS.shape[1]), TOKENS.shape)
    inputs = dict(decoder_segment_ids=jnp.ones_like(TOKENS), enable_dropout=False)
    keys = {name: jax.random.key(0) for name in ("params", "dropout")}
    with jax.set_mesh(mesh):
        params = meta.unbox(model.init(keys, TOKENS, positions, **inputs)["params"])

    def apply(params, tokens):
        return model.apply({"params": params}, tokens, positions, **inputs)

    return Case(apply, jax.tree.map(jnp.asarray, jax.device_get(params)), (TOKENS,), mesh=mesh)


def maxtext_moe(ragged: bool) -> Case:
    """Experts as ragged products or as einsums. Each token has all of them, because another choice is no
    rounding error."""
    options = dict(num_experts=4, num_experts_per_tok=4, base_moe_mlp_dim=64)
    return maxtext_llama("mixtral", "data", **options, sparse_matmul=ragged, megablox=False)


# --- Haiku and Penzai ---------------------------------------------------------------------------------


def haiku_transformer() -> Case:
    import haiku as hk

    def model(tokens):
        init = hk.initializers.VarianceScaling()
        x = hk.Embed(64, 32, name="embed")(tokens)
        attention = hk.MultiHeadAttention(4, 8, model_size=32, w_init=init)
        mask = jnp.tril(jnp.ones((1, 1, tokens.shape[1], tokens.shape[1])))
        x = x + attention(x, x, x, mask=mask)
        return hk.Linear(64, name="lm_head")(x + hk.nets.MLP((64, 32), activation=jax.nn.gelu)(x))

    fn = hk.without_apply_rng(hk.transform(model))
    return Case(fn.apply, fn.init(jax.random.key(0), TOKENS), (TOKENS,))


def penzai_llama() -> Case:
    from penzai import pz
    from penzai.models.transformer.variants import llamalike_common

    config = llamalike_common.LlamalikeTransformerConfig(
        **dict(num_kv_heads=2, query_head_multiplier=2, embedding_dim=32, projection_dim=8),
        **dict(mlp_hidden_dim=64, num_decoder_blocks=2, vocab_size=64, mlp_variant="swiglu"),
        **dict(tie_embedder_and_logits=False, use_layer_stack=True),
    )
    model = llamalike_common.build_llamalike_transformer(config, jax.random.key(0))
    unbound, variables = pz.unbind_params(model, freeze=True)

    def apply(params, tokens):
        tagged = pz.nx.wrap(tokens).tag("batch", "seq")
        positions = pz.nx.arange("seq", tokens.shape[1])
        logits = pz.bind_variables(unbound, list(params.values()))(
            tagged, token_positions=positions
        )
        return logits.unwrap("batch", "seq", "vocabulary")

    return Case(apply, {v.label: v for v in variables}, (TOKENS,))


# --- Levanter -----------------------------------------------------------------------------------------


def levanter_llama() -> Case:
    """Named arrays in Equinox's modules; a loop with checkpoints picks the layers from a stack."""
    import haliax as hax
    from levanter.layers.attention import AttentionMask
    from levanter.models.llama import LlamaConfig

    sizes = dict(hidden_dim=32, intermediate_dim=64, num_layers=2, num_heads=4, num_kv_heads=2)
    config = LlamaConfig(max_seq_len=16, **sizes)
    model = config.build(hax.Axis("vocab", 64), key=jax.random.key(0))
    axes = "batch", "position"

    def apply(model, tokens):
        logits = model(hax.named(tokens, axes), AttentionMask.causal())
        return logits.rearrange((*axes, "vocab")).array

    return Case(apply, model, (TOKENS,), SCALE_OF_COLUMNS)


PROJECTS = {
    "tunix, Llama 3": Project(tunix_llama, "tunix", "google-tunix"),
    "tunix, Llama 3 with LoRA of Qwix": Project(tunix_lora, "tunix", "qwix"),
    "tunix, Qwen 3": Project(tunix_qwen3, "tunix", "google-tunix"),
    "tunix, Qwen 3 with experts": Project(tunix_moe, "tunix", "google-tunix"),
    "tunix, Gemma 3": Project(tunix_gemma3, "tunix", "google-tunix"),
    "transformers, Llama": Project(huggingface_llama, "linen", "transformers"),
    "transformers, Mistral": Project(huggingface_mistral, "linen", "transformers"),
    "transformers, Gemma": Project(huggingface_gemma, "linen", "transformers"),
    "MaxText, Llama 2": Project(maxtext_llama, "maxtext", "maxtext"),
    "MaxText, Mixtral": Project(partial(maxtext_moe, True), "maxtext", "maxtext"),
    "MaxText, Mixtral by einsums": Project(partial(maxtext_moe, False), "maxtext", "maxtext"),
    "Levanter, Llama": Project(levanter_llama, "levanter", "marin-levanter"),
    "gemma, Gemma 3": Project(gemma_library, "gemma", "gemma"),
    "Haiku, attention and MLP": Project(haiku_transformer, "linen", "dm-haiku"),
    "Penzai, Llama": Project(penzai_llama, "linen", "penzai"),
    "diffusers, Stable Diffusion's UNet": Project(huggingface_unet, "linen", "diffusers"),
}
