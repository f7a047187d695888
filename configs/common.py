"""Every key of a run: its default, the values that it accepts, and what it means.

The other configs change defaults; none can add a key. In one of them:
from configs import common; config = common.get_config(); config.model.name = "vit_b32".
"""

from ml_collections import ConfigDict

SOURCES = (
    "emoji", "icons", "synthetic", "tfds", "webdataset", "table", "parquet", "folders", "huggingface"
)  # fmt: skip
ICON_SPLITS = ("train", "val", "test", "test_sets", "test_both")
_FROM_0, _FROM_1 = "[0, 1e9]", "[1, 1e9]"  # of steps, classes, examples

# {key: (default, accepted values, meaning)}. A value has the type of its default. Accepted are an interval of
# finite numbers, the listed texts, or with None any value.
# fmt: off
KEYS: dict[str, tuple] = {
    "model.name": ("tiny", ("tiny", "vit_b32", "vit_b16", "vit_l14", "vit_h14", "weights"),
        "sizes of both towers, unless the keys below set them; weights: those of checkpoint.init_from, with "
        "architecture, activation and fitting of pictures. Then '' and 0 mean the weights' own"),
    "model.architecture": ("clip", ("", "clip", "siglip"),
        "siglip: no class token, attention (MAP) pooling, no causal mask; its loss is sigmoid"),
    "model.vision.width": (0, "[0, 65536]", "features of a token; 0: the named model's own"),
    "model.vision.layers": (0, "[0, 1024]", "blocks; 0: the named model's own"),
    "model.vision.heads": (0, "[0, 1024]", "attention heads a block; 0: the named model's own"),
    "model.vision.mlp_ratio": (0.0, "[0, 64]", "features of the MLP / width; 0: the named model's own"),
    "model.vision.patch_size": (0, "[0, 4096]", "pixels, height = width; 0: the named model's own"),
    "model.vision.resize_mode": ("", ("", "shortest", "longest", "squash"),
        "how pictures become squares: shortest (scale the shorter side, crop the center), longest (scale the "
        "longer side, add a border), squash (change the shape). '': shortest"),
    "model.vision.interpolation": ("", ("", "bicubic", "bilinear", "random"),
        "filter that scales pictures; random: bicubic or bilinear in training, else bicubic. '': bicubic"),
    "model.vision.fill_color": (0, "[0, 255]", "longest: level of the border"),
    "model.text.width": (0, "[0, 65536]", "features of a token; 0: the named model's own"),
    "model.text.layers": (0, "[0, 1024]", "blocks; 0: the named model's own"),
    "model.text.heads": (0, "[0, 1024]", "attention heads a block; 0: the named model's own"),
    "model.text.mlp_ratio": (0.0, "[0, 64]", "features of the MLP / width; 0: the named model's own"),
    "model.text.vocab_size": (0, "[0, 16777216]", "token ids; 0: the named model's own, those of CLIP"),
    "model.embed_dim": (0, "[0, 65536]", "features of an embedding; 0: the named model's own"),
    "model.recipe": ("switchback", (
        "standard", "switchback", "switchback_m", "switchback_q", "switchback_hadamard",
        "int8_hadamard", "llm_int8", "llm_int8_outlier6", "fp8_switchback", "fp8_tensorwise",
        "fp8_static", "fp8_hadamard", "fp8_block128", "fp4_dge", "mxfp8", "nvfp4", "auto"),
        "precision of the linear layers of every block; auto: the fastest on the chip when the run begins"),
    "model.dtype": ("bfloat16", ("float32", "bfloat16", "float16"),
        "dtype of computation; parameters are float32"),
    "model.attention": ("", ("", "xla", "cudnn", "fused"),
        "'': the fastest that can run; triton: an alias of fused"),
    "model.remat": ("none", ("none", "full", "dots", "save_quantized", "save_linear"),
        "what a block saves for the backward pass: none (no recomputation), full (its input only), "
        "dots, save_quantized, save_linear. All save quantized weights"),
    "model.scan_layers": (False, None, "True compiles faster, False runs faster"),
    "model.layer_scale": (False, None, "zero-initialized scale on residual branches: for stability"),
    "model.qk_norm": (False, None, "LayerNorm on queries and keys"),
    "model.gelu": ("exact", ("", "exact", "tanh", "quick"), "quick: OpenAI's weights"),
    "model.patch_dropout": (0.0, "[0, 1)", "fraction of the patches left out in training"),

    "data.name": ("emoji", (*SOURCES, "mixture"), "docs/data.md"),
    "data.emoji.task": ("mixed", ("mixed", "strict"), "strict: no drawing of the test style is trained on"),
    "data.icons.config": ("full", ("full", "slice"), "slice: 8 of 215 sets, 15,000 drawings; docs/icons.md"),
    "data.icons.archive": ("", None, "path of the npm package; '': the one in data.dir"),
    "data.icons.splits.train": ("train", ICON_SPLITS, "split to train on"),
    "data.icons.splits.val": ("val", ("", *ICON_SPLITS), "the same; '': no validation"),
    "data.icons.splits.test": ("test", ("", *ICON_SPLITS), "the same; '': no test"),
    "data.synthetic.classes": (1000, _FROM_1, "patterns"),
    "data.synthetic.examples": (100_000, _FROM_1, "training examples"),
    "data.tfds.builder": ("", None, "a TensorFlow Datasets builder, such as 'coco_captions'"),
    "data.tfds.image_key": ("image", None, "feature that holds the image"),
    "data.tfds.text_key": ("caption;captions/text;captions;text", None,
        "features in order of preference; the first that exists holds captions"),
    "data.tfds.splits.train": ("train", None, "the builder's name of the split"),
    "data.tfds.splits.val": ("val", None, "the same; '': no validation"),
    "data.tfds.splits.test": ("test", None, "the same; '': no test"),
    "data.webdataset.image_key": ("jpg;jpeg;png;webp", None, "extensions of images in the tars"),
    "data.webdataset.text_key": ("txt", None, "extensions of captions"),
    "data.webdataset.splits.train": ("", None, "paths or URLs, as in 'laion/{00000..41455}.tar'"),
    "data.webdataset.splits.val": ("", None, "the same; '': no validation"),
    "data.webdataset.splits.test": ("", None, "the same; '': no test"),
    "data.table.image_key": ("image;filepath;file_name;image_path", None, "column of paths"),
    "data.table.text_key": ("caption;text;title", None, "column that holds captions"),
    "data.table.splits.train": ("", None, "path of a .csv, .tsv or .jsonl file"),
    "data.table.splits.val": ("", None, "the same; '': no validation"),
    "data.table.splits.test": ("", None, "the same; '': no test"),
    "data.parquet.image_key": ("image;jpg;jpeg;png;webp", None,
        "columns in order of preference; the first that exists holds images"),
    "data.parquet.text_key": ("caption;text;txt;title", None, "the same for captions"),
    "data.parquet.splits.train": ("", None, "paths or URLs, as in 'laion/{00000..00127}.parquet'"),
    "data.parquet.splits.val": ("", None, "the same; '': no validation"),
    "data.parquet.splits.test": ("", None, "the same; '': no test"),
    "data.folders.template": ("a photo of a {}.", None, "caption without a text file; {}: the folder"),
    "data.folders.splits.train": ("", None, "a folder of pictures"),
    "data.folders.splits.val": ("", None, "the same; '': no validation"),
    "data.folders.splits.test": ("", None, "the same; '': no test"),
    "data.huggingface.image_key": ("image", None, "column that holds images"),
    "data.huggingface.text_key": ("caption;text;title", None, "column that holds captions"),
    "data.huggingface.splits.train": ("", None,
        "OWNER/NAME[/CONFIG]/SPLIT on the hub, or a directory that datasets' save_to_disk wrote"),
    "data.huggingface.splits.val": ("", None, "the same; '': no validation"),
    "data.huggingface.splits.test": ("", None, "the same; '': no test"),
    "data.dir": ("data", None, "directory of prepared data sets"),
    "data.image_size": (64, "[0, 4096]", "pixels, height = width; 0: the weights' own"),
    "data.context_length": (16, "[0, 4096]", "tokens a caption; 0: the weights' own"),
    "data.tokenizer": ("", None,
        "SigLIP's tokenizer.json or model of SentencePiece, a path or an fsspec address, which the run "
        "copies; '': that of the weights, or CLIP's"),
    "data.augment.drawings": (True, None,
        "light augmentation of drawings (emoji, icons), on the device. The other keys are for photographs"),
    "data.augment.scale": ((0.9, 1.0), "(0, 1]", "smallest and largest share of the area that a crop keeps"),
    "data.augment.ratio": ((3 / 4, 4 / 3), "(0, 100]", "smallest and largest width / height of a crop"),
    "data.augment.hflip": (0.0, "[0, 1]", "probability that left and right are exchanged"),
    "data.augment.randaugment": (0, "[0, 100]", "operations of RandAugment a picture; 0: off"),
    "data.augment.magnitude": (9, "[0, 30]", "strength of these operations"),
    "data.augment.color_jitter": ((0.0, 0.0, 0.0, 0.0), "[0, 1]",
        "largest change of brightness, contrast, saturation and hue, such as 0.32,0.32,0.32,0.08; hue: at "
        "most 0.5"),
    "data.augment.color_jitter_prob": (1.0, "[0, 1]", "probability that a picture is jittered"),
    "data.augment.gray_scale_prob": (0.0, "[0, 1]", "probability that a picture becomes gray"),
    "data.augment.re_prob": (0.0, "[0, 1]", "probability that a rectangle becomes noise (random erasing)"),
    "data.workers": (0, "[0, 4096]", "loader processes; 0: threads"),
    "data.shuffle": ("global", ("global", "shard"),
        "global: over all examples; shard: over files, and over the examples of a few files at a time"),
    "data.shuffle_shards": (16, _FROM_1, "shard: number of files at a time"),
    "data.on_bad": ("skip", ("skip", "stop"),
        "examples that cannot be read: skip them, or stop at the first"),
    "data.max_bad_share": (0.01, "[0, 1]", "skip: stop if a larger share is bad"),

    "optimizer.name": ("stable_adamw", ("stable_adamw", "adamw", "muon"),
        "muon: Muon for the matrices of the blocks, with a momentum of 0.95, and AdamW for the rest. "
        "Both use learning_rate, whose scale is that of AdamW. Muon's products are in float16 (on "
        "TPUs bfloat16) if model.dtype has 16 bits, and in float32 otherwise"),
    "optimizer.coefficients": ("auto", ("auto", "quintic", "nonic", "polar_express"),
        "muon: of the polynomials that orthogonalize, see swjax.optax.muon"),
    "optimizer.learning_rate": (2e-3, "(0, 1e6]", "peak of the schedule"),
    "optimizer.b1": (0.9, "[0, 1)", "decay of the first moment"),
    "optimizer.b2": (0.99, "[0, 1)", "decay of the second moment"),
    "optimizer.b2_power": (0.0, "[0, 1]", "stable_adamw: b2 = 1 - t^-b2_power at step t; 0: off"),
    "optimizer.eps": (1e-6, "[1.2e-38, 1]", "added to the root of the second moment"),
    "optimizer.weight_decay": (0.2, "[0, 1e6]", "of matrices except position embeddings"),
    "optimizer.clip_threshold": (1.0, "[0, inf)", "stable_adamw: largest RMS of g / sqrt(v); 0: off"),
    "optimizer.grad_clip_norm": (0.0, "[0, inf)", "clips the gradient's global norm; 0: off"),
    "optimizer.eight_bit_moments": (False, None, "store moments in 8 bits"),
    "optimizer.loss_scaling": ("", ("", "per_tensor", "dynamic"),
        "float16 needs a scaled loss: per_tensor (fixed scale; only tensors with a non-finite gradient "
        "skip the step), dynamic (all tensors skip it, and the scale is halved), '': off"),
    "optimizer.loss_scale": (65536.0, "[1, 1e30]", "the fixed scale, or the first one of dynamic"),
    "optimizer.loss_scale_growth_steps": (2000, _FROM_1, "dynamic: finite steps until the scale doubles"),
    "optimizer.freeze": ((), None, "regular expressions; matching parameters are not trained"),
    "optimizer.layer_decay": (1.0, "(0, 1]",
        "learning rate of a block / that of the next one, in both towers; the embeddings have the lowest"),
    "optimizer.lora.rank": (0, "[0, 65536]",
        "trains matrices of this rank for kernels of the blocks, and the logits' scale and bias; all else "
        "is frozen, kernels in 8 bits if the recipe allows; 0: off"),
    "optimizer.lora.alpha": (0.0, "[0, 1e6]", "the matrices change a kernel by alpha / rank a b; 0: rank"),
    "optimizer.lora.pattern": ("", None,
        "regular expression; adapts linear layers of the blocks whose path it matches, such as "
        "'vision/blocks/attn/[qv]'; '': all"),

    "schedule.name": ("cosine", ("cosine", "linear", "constant", "wsd", "rsqrt"),
        "after the linear warm-up; wsd: stable, then a decay by 1 - sqrt; rsqrt: inverse square root, "
        "then a linear decay"),
    "schedule.floor": (0.0, "[0, 1]", "last learning rate / peak; unused by constant"),
    "schedule.decay": (0.1, "(0, 1]", "share of the run, at its end, in which wsd and rsqrt decay"),
    "schedule.warmup_steps": (0, _FROM_0, "warm-up in steps; set at most one of the three"),
    "schedule.warmup_epochs": (0.0, "[0, 1e6]", "warm-up in epochs; 0: not set"),
    "schedule.warmup_examples": (0, "[0, 1e15]", "warm-up in examples; 0: not set"),

    "train.batch_size": (128, "[1, 1e8]", "pairs per step over all devices"),
    "train.steps": (1000, _FROM_0, "duration in steps; set one of the three, others to 0"),
    "train.epochs": (0.0, "[0, 1e6]", "duration in epochs; 0: not set"),
    "train.examples": (0, "[0, 1e15]", "duration in examples; 0: not set"),
    "train.accumulation": (1, "[1, 65536]", "micro-batches a step; the loss still contrasts the whole batch"),
    "train.loss": ("softmax", ("", "softmax", "sigmoid"),
        "softmax: CLIP; sigmoid: SigLIP; '': sigmoid if the weights have a logit bias"),
    "train.reduce_dtype": ("float32", ("float32", "bfloat16", "int8", "float8_e4m3fn"),
        "dtype in which devices all-reduce the gradients of the blocks' kernels"),
    "train.reduce_once": (True, None,
        "whether replicated gradients are all-reduced at once after the backward pass, or, if False, "
        "layer by layer during it, for a network slower than NVLink"),
    "train.concurrent_kernels": (False, None,
        "whether independent kernels of a step run at the same time on a GPU: docs/training.md. It needs "
        "about twice the memory, and model.remat='none'"),
    "train.ema_decay": (0.0, "[0, 1)", "evaluates an average of the parameters; 0: off"),
    "train.nan_policy": ("stop", ("stop", "skip", "rollback"),
        "when a value is not finite, from the batch to the update: stop, skip the step (stop if it is a "
        "parameter, or after 50 skipped steps in a row), or rollback to the last checkpoint, skipping "
        "the data read since"),
    "train.seed": (0, "[0, 2147483647]", "of parameters, data order, augmentation and dropout"),
    "train.compilation_cache": (".cache/jax", None, "directory; '': compile every time"),
    "train.profile_steps": ((), _FROM_1,
        "first and last step to trace into WORKDIR/profile, such as 100,105; (): no trace"),

    "eval.data": ("", None, "data set or part of the mixture; '': the training data set"),
    "eval.zeroshot": ((), None,
        "labelled sets for zero-shot classification, [NAME=]KIND:WHERE each, scored with the validation "
        "split: folders:FOLDER | webdataset:TARS (with .cls) | table:FILE | parquet:FILES | "
        "tfds:BUILDER/SPLIT. docs/evaluation.md"),
    "eval.every_steps": (0, _FROM_0, "steps between validations; 0: only after the last step"),
    "eval.batch_size": (256, "[1, 1e8]", "over all devices"),
    "eval.captions_per_image": (5, "[0, 1e6]", "number used for retrieval; 0: all"),

    "mesh.data": (-1, "[-1, 1e6]",
        "the batch is sharded, the parameters are replicated; -1 on one axis: all remaining devices"),
    "mesh.fsdp": (1, "[-1, 1e6]", "the batch and the parameters are sharded"),
    "mesh.tensor": (1, "[-1, 1e6]", "the width of the layers is sharded"),

    "checkpoint.every_steps": (0, _FROM_0,
        "steps between checkpoints; 0: only after the last step and when interrupted"),
    "checkpoint.keep": (2, "[1, 1e6]", "number of newest checkpoints to keep"),
    "checkpoint.resume": ("", None, "a workdir to continue if this one has no checkpoint"),
    "checkpoint.init_from": ("", None,
        "initial parameters, nothing else: a workdir, or weights of open_clip, OpenAI, Hugging Face or "
        "big_vision (the file or its folder, a path or an fsspec address). docs/fine_tuning.md"),
    "checkpoint.mirror": ("", None,
        "an fsspec address, such as gs://bucket/run, to which the run is copied while it trains, and "
        "from which it continues if the workdir has no newer checkpoint; '': off"),

    "log.every_steps": (20, _FROM_1, "steps between writes; metrics of every step are written"),
    "log.tensorboard": (True, None, "writes WORKDIR/tensorboard"),
    "log.wandb": ("", None, "Weights & Biases project; '': off"),

    "diagnostics.rms": (True, None, "RMS of every tensor's update, each step"),
    "diagnostics.features": (True, None, "mean and maximum |x| of every block's output, each step"),
    "diagnostics.norms": (True, None, "norm of the update, each step"),
    "diagnostics.every_steps": (200, _FROM_0,
        "steps between measurements of zeros, saturated values and SQNR of each quantized operand; "
        "0: never"),

    "report.enabled": (True, None, "writes WORKDIR/report/index.html at the end"),
}
# fmt: on


def get_config() -> ConfigDict:
    """Returns the locked default config: a tiny CLIP on the emoji drawings."""
    config = ConfigDict()
    for key, (default, *_) in KEYS.items():
        *sections, name = key.split(".")
        section = config
        for part in sections:
            if part not in section:
                section[part] = ConfigDict()
            section = section[part]
        section[name] = default
    # Parts to mix: {any name: {"name": one of `SOURCES`, "weight": number, and its options}}.
    config.data.mixture = ConfigDict()
    return config.lock()


def paper(model: str, recipe: str) -> ConfigDict:
    """Returns the training recipe of arXiv 2304.13013 for one of its models, in bfloat16.

    Args:
      model: vit_b32 | vit_b16 | vit_l14 | vit_h14.
      recipe: of the linear layers.
    """
    config = get_config()
    config.model.name = model
    config.model.recipe = recipe
    config.model.patch_dropout = 0.5
    config.data.name = "synthetic"
    config.data.image_size = 224
    config.data.context_length = 77
    config.mesh.data = 1
    config.mesh.fsdp = -1  # docs/scaling.md
    config.schedule.warmup_steps = 5000
    config.train.batch_size = 16384
    config.train.steps = 20_000
    config.checkpoint.every_steps = 1000
    config.eval.every_steps = 1000
    config.eval.batch_size = 1024
    return config
