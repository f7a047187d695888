"""Every key of a run, with its default. The other configs change some; none can add one.

Use: from configs import common; config = common.get_config(); config.model.name = "vit_b32".
A key whose value is 0, 0.0 or "" is off where its comment says so.
swjax/training/keys.py has the type and the range of each.
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    """Returns the locked default config: a tiny CLIP on the emoji drawings."""
    config = ConfigDict()

    config.model = ConfigDict()
    config.model.name = "tiny"  # tiny | vit_b32 | vit_b16 | vit_l14 | vit_h14
    # clip | siglip: no class token, attention (MAP) pooling, no causal mask; its loss is sigmoid.
    config.model.architecture = "clip"
    config.model.vision = ConfigDict()  # sizes of the image tower; 0: the named model's own
    config.model.vision.width = 0  # features of a token; 0: the named model's own
    config.model.vision.layers = 0  # blocks; 0: the named model's own
    config.model.vision.heads = 0  # attention heads a block; 0: the named model's own
    config.model.vision.patch_size = 0  # pixels, height = width; 0: the named model's own
    config.model.text = ConfigDict()  # sizes of the text tower
    config.model.text.width = 0  # features of a token; 0: the named model's own
    config.model.text.layers = 0  # blocks; 0: the named model's own
    config.model.text.heads = 0  # attention heads a block; 0: the named model's own
    config.model.embed_dim = 0  # features of an embedding; 0: the named model's own
    # Precision of the linear layers of every block: standard | switchback | switchback_m |
    # switchback_q | switchback_hadamard | llm_int8 | llm_int8_outlier6 | fp8_switchback |
    # fp8_tensorwise.
    config.model.recipe = "switchback"
    config.model.dtype = "bfloat16"  # compute: float32 | bfloat16 | float16; parameters are float32
    config.model.attention = ""  # xla | cudnn | triton; "": the fastest that can run
    # What a block saves for the backward pass: none (no recomputation) | full (its input only) |
    # dots | save_quantized | save_linear. All save quantized weights.
    config.model.remat = "none"
    config.model.scan_layers = False  # True compiles faster, False runs faster
    config.model.layer_scale = False  # zero-initialized scale on residual branches: for stability
    config.model.qk_norm = False  # LayerNorm on queries and keys
    config.model.gelu = "exact"  # exact | tanh | quick (OpenAI's weights)
    config.model.patch_dropout = 0.0  # fraction of the patches left out in training

    config.data = ConfigDict()
    # emoji | icons | synthetic | tfds | webdataset | table | parquet | folders | huggingface |
    # mixture. docs/data.md
    config.data.name = "emoji"
    config.data.emoji = ConfigDict()
    config.data.emoji.task = "mixed"  # mixed | strict: no drawing of the test style is trained on
    config.data.icons = ConfigDict()  # docs/icons.md
    config.data.icons.config = "full"  # full | slice: 8 of 215 sets, 15,000 drawings
    config.data.icons.archive = ""  # path of the npm package; "": the one in data.dir
    config.data.icons.splits = ConfigDict()
    config.data.icons.splits.train = "train"  # train | val | test | test_sets | test_both
    config.data.icons.splits.val = "val"  # the same; "": no validation
    config.data.icons.splits.test = "test"  # the same; "": no test
    config.data.synthetic = ConfigDict()  # patterns of noise
    config.data.synthetic.classes = 1000  # patterns
    config.data.synthetic.examples = 100_000  # training examples
    config.data.tfds = ConfigDict()
    config.data.tfds.builder = ""  # a TensorFlow Datasets builder, such as "coco_captions"
    config.data.tfds.image_key = "image"  # feature that holds the image
    # Features in order of preference; the first that exists holds captions.
    config.data.tfds.text_key = "caption;captions/text;captions;text"
    config.data.tfds.splits = ConfigDict()
    config.data.tfds.splits.train = "train"  # the builder's name of the split
    config.data.tfds.splits.val = "val"  # the same; "": no validation
    config.data.tfds.splits.test = "test"  # the same; "": no test
    config.data.webdataset = ConfigDict()
    config.data.webdataset.image_key = "jpg;jpeg;png;webp"  # extensions of images in the tars
    config.data.webdataset.text_key = "txt"  # extensions of captions
    config.data.webdataset.splits = ConfigDict()
    config.data.webdataset.splits.train = ""  # paths or URLs, as in "laion/{00000..41455}.tar"
    config.data.webdataset.splits.val = ""  # the same; "": no validation
    config.data.webdataset.splits.test = ""  # the same; "": no test
    config.data.table = ConfigDict()
    config.data.table.image_key = "image;filepath;file_name;image_path"  # column of paths
    config.data.table.text_key = "caption;text;title"  # column that holds captions
    config.data.table.splits = ConfigDict()
    config.data.table.splits.train = ""  # path of a .csv, .tsv or .jsonl file
    config.data.table.splits.val = ""  # the same; "": no validation
    config.data.table.splits.test = ""  # the same; "": no test
    config.data.parquet = ConfigDict()
    # Columns in order of preference; the first that exists holds images.
    config.data.parquet.image_key = "image;jpg;jpeg;png;webp"
    config.data.parquet.text_key = "caption;text;txt;title"  # the same for captions
    config.data.parquet.splits = ConfigDict()
    config.data.parquet.splits.train = ""  # paths or URLs, as in "laion/{00000..00127}.parquet"
    config.data.parquet.splits.val = ""  # the same; "": no validation
    config.data.parquet.splits.test = ""  # the same; "": no test
    config.data.folders = ConfigDict()
    config.data.folders.template = "a photo of a {}."  # caption without a text file; {}: the folder
    config.data.folders.splits = ConfigDict()
    config.data.folders.splits.train = ""  # a folder of pictures
    config.data.folders.splits.val = ""  # the same; "": no validation
    config.data.folders.splits.test = ""  # the same; "": no test
    config.data.huggingface = ConfigDict()
    config.data.huggingface.image_key = "image"  # column that holds images
    config.data.huggingface.text_key = "caption;text;title"  # column that holds captions
    config.data.huggingface.splits = ConfigDict()
    config.data.huggingface.splits.train = ""  # directory that datasets' save_to_disk wrote
    config.data.huggingface.splits.val = ""  # the same; "": no validation
    config.data.huggingface.splits.test = ""  # the same; "": no test
    # Parts to mix: {any name: {"name": one of the above, "weight": number, and its options}}.
    config.data.mixture = ConfigDict()
    config.data.dir = "data"  # directory of prepared data sets
    config.data.image_size = 64  # pixels, height = width
    config.data.context_length = 16  # tokens a caption
    config.data.augment = True  # light augmentation of the training images, on the device
    config.data.workers = 0  # loader processes; 0: threads
    # global (over all examples) | shard (over files, and over the examples of a few files at a time).
    config.data.shuffle = "global"
    config.data.shuffle_shards = 16  # shard: number of files at a time
    config.data.on_bad = "skip"  # examples that cannot be read: skip | stop at the first
    config.data.max_bad_share = 0.01  # skip: stop if a larger share is bad

    config.optimizer = ConfigDict()
    # stable_adamw | adamw | muon: Muon for the matrices of the blocks, with a momentum of 0.95, and AdamW for
    # the rest. Both use learning_rate, whose scale is that of AdamW. Muon's products are in
    # bfloat16 if model.dtype is, and in float32 otherwise.
    config.optimizer.name = "stable_adamw"
    config.optimizer.learning_rate = 2e-3  # peak of the schedule
    config.optimizer.b1 = 0.9  # decay of the first moment
    config.optimizer.b2 = 0.99  # decay of the second moment
    config.optimizer.b2_power = 0.0  # stable_adamw: b2 = 1 - t^-b2_power at step t; 0: off
    config.optimizer.eps = 1e-6  # added to the root of the second moment
    config.optimizer.weight_decay = 0.2  # of matrices except position embeddings
    config.optimizer.clip_threshold = 1.0  # stable_adamw: largest RMS of an update; 0: off
    config.optimizer.grad_clip_norm = 0.0  # clips the gradient's global norm; 0: off
    # float16 needs a scaled loss: per_tensor (fixed scale; only tensors with a non-finite gradient skip the
    # step) | dynamic (all tensors skip it, and the scale is halved) | "": off.
    config.optimizer.loss_scaling = ""
    config.optimizer.loss_scale = 65536.0  # the fixed scale, or the first one of dynamic
    config.optimizer.loss_scale_growth_steps = 2000  # dynamic: finite steps until the scale doubles
    config.optimizer.freeze = ()  # regular expressions; matching parameters are not trained

    config.schedule = ConfigDict()
    # After the linear warm-up: cosine | linear | constant | wsd (stable, then a decay by 1 - sqrt) | rsqrt
    # (inverse square root, then a linear decay).
    config.schedule.name = "cosine"
    config.schedule.floor = 0.0  # last learning rate / peak; unused by constant
    config.schedule.decay = 0.1  # share of the run, at its end, in which wsd and rsqrt decay
    config.schedule.warmup_steps = 0  # warm-up in steps; set at most one of the three
    config.schedule.warmup_epochs = 0.0  # warm-up in epochs; 0: not set
    config.schedule.warmup_examples = 0  # warm-up in examples; 0: not set

    config.train = ConfigDict()
    config.train.batch_size = 128  # pairs per step over all devices
    config.train.steps = 1000  # duration in steps; set one of the three, others to 0
    config.train.epochs = 0.0  # duration in epochs; 0: not set
    config.train.examples = 0  # duration in examples; 0: not set
    config.train.accumulation = 1  # micro-batches a step; the loss still contrasts the whole batch
    config.train.loss = "softmax"  # softmax (CLIP) | sigmoid (SigLIP)
    # Dtype in which devices all-reduce the gradients of the blocks' kernels: float32 | bfloat16.
    config.train.reduce_dtype = "float32"
    # Whether replicated gradients are all-reduced at once after the backward pass, or, if False, layer by
    # layer during it, for a network slower than NVLink.
    config.train.reduce_once = True
    config.train.ema_decay = 0.0  # evaluates an average of the parameters; 0: off
    # What to do when a value is not finite, from the batch to the update: stop | skip (the step; stop if
    # it is a parameter, or after 50 skipped steps in a row) | rollback (to the last checkpoint, skipping the
    # data read since).
    config.train.nan_policy = "stop"
    config.train.seed = 0  # of parameters, data order, augmentation and dropout
    # Whether independent kernels of a step run at the same time on a GPU. A step of ViT-B in `switchback` was
    # 6 to 13 % faster on an H100, and 0 to 6 % on an H200. It needs about twice the memory, and
    # model.remat='none'.
    config.train.concurrent_kernels = False
    config.train.compilation_cache = ".cache/jax"  # directory; "": compile every time
    # First and last step to trace into WORKDIR/profile, such as 100,105; (): no trace.
    config.train.profile_steps = ()

    config.eval = ConfigDict()
    config.eval.data = ""  # data set or part of the mixture; "": the training data set
    # Labelled sets for zero-shot classification, [NAME=]KIND:WHERE each, scored with the validation split:
    # folders:FOLDER | webdataset:TARS (with .cls) | table:FILE | parquet:FILES | tfds:BUILDER/SPLIT.
    # docs/evaluation.md
    config.eval.zeroshot = ()
    config.eval.every_steps = 0  # steps between validations; 0: only after the last step
    config.eval.batch_size = 256  # over all devices
    config.eval.captions_per_image = 5  # number used for retrieval; 0: all

    config.mesh = ConfigDict()  # devices along each axis
    # The batch is sharded, the parameters are replicated; -1 on one axis: all remaining devices.
    config.mesh.data = -1
    config.mesh.fsdp = 1  # the batch and the parameters are sharded
    config.mesh.tensor = 1  # the width of the layers is sharded

    config.checkpoint = ConfigDict()
    # Steps between checkpoints; 0: only after the last step and when interrupted.
    config.checkpoint.every_steps = 0
    config.checkpoint.keep = 2  # number of newest checkpoints to keep
    config.checkpoint.resume = ""  # a workdir to continue if this one has no checkpoint
    # Initial parameters, nothing else: a workdir, or weights of open_clip, OpenAI, Hugging Face or
    # big_vision (the file or its folder, a path or an fsspec address). docs/fine_tuning.md
    config.checkpoint.init_from = ""
    # An fsspec address, such as gs://bucket/run, to which the run is copied while it trains, and from which
    # it continues if the workdir has no newer checkpoint; "": off.
    config.checkpoint.mirror = ""

    config.log = ConfigDict()
    config.log.every_steps = 20  # steps between writes; metrics of every step are written
    config.log.tensorboard = True  # writes WORKDIR/tensorboard
    config.log.wandb = ""  # Weights & Biases project; "": off

    config.diagnostics = ConfigDict()  # docs/diagnostics.md
    config.diagnostics.rms = True  # RMS of every tensor's update, each step
    config.diagnostics.features = True  # mean and maximum |x| of every block's output, each step
    config.diagnostics.norms = True  # norm of the update, each step
    # Steps between measurements of zeros, saturated values and SQNR of each quantized operand; 0: never.
    config.diagnostics.every_steps = 200

    config.report = ConfigDict()
    config.report.enabled = True  # writes WORKDIR/report/index.html at the end

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
