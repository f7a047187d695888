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
    config.model.layer_scale = False  # zero-initialised scale on residual branches: stabilizes fp8
    config.model.qk_norm = False  # LayerNorm on queries and keys
    config.model.gelu = "exact"  # exact | tanh | quick (OpenAI's weights)
    config.model.patch_dropout = 0.0  # fraction of the patches left out in training

    config.data = ConfigDict()
    # emoji | icons | synthetic | tfds | webdataset | table | parquet | folders | huggingface |
    # mixture. docs/data.md
    config.data.name = "emoji"
    config.data.emoji = ConfigDict()
    config.data.emoji.task = "mixed"  # mixed | strict, whose test style is never trained on
    config.data.icons = ConfigDict()  # docs/icons.md
    config.data.icons.config = "full"  # full | slice: 8 of 215 sets, 15,000 drawings
    config.data.icons.archive = ""  # path of the npm package; "": where it is in data.dir
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
    config.data.tfds.text_key = "caption;captions/text;captions;text"  # the first feature there is
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
    config.data.table.image_key = "image"  # column that holds images' paths
    config.data.table.text_key = "caption"  # column that holds captions
    config.data.table.splits = ConfigDict()
    config.data.table.splits.train = ""  # path of a .csv, .tsv or .jsonl file
    config.data.table.splits.val = ""  # the same; "": no validation
    config.data.table.splits.test = ""  # the same; "": no test
    config.data.parquet = ConfigDict()
    config.data.parquet.image_key = "image;jpg;jpeg;png;webp"  # the first column there is
    config.data.parquet.text_key = "caption;text;txt"  # the same for captions
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
    config.data.huggingface.text_key = "caption"  # column that holds captions
    config.data.huggingface.splits = ConfigDict()
    config.data.huggingface.splits.train = ""  # directory that datasets' save_to_disk wrote
    config.data.huggingface.splits.val = ""  # the same; "": no validation
    config.data.huggingface.splits.test = ""  # the same; "": no test
    # Parts to mix: {any name: {"name": one of the above, "weight": number, and its options}}.
    config.data.mixture = ConfigDict()
    config.data.dir = "data"  # prepared data sets are kept here
    config.data.image_size = 64  # pixels, height = width
    config.data.context_length = 16  # tokens a caption
    config.data.augment = True  # light augmentation of the training images, on the device
    config.data.workers = 0  # loader processes; 0: threads
    config.data.shuffle = "global"  # global | shard: files in random order, some at a time
    config.data.shuffle_shards = 16  # shard: so many files at a time
    config.data.on_bad = "skip"  # examples that cannot be read: skip | stop at the first
    config.data.max_bad_share = 0.01  # skip: stop when more than this share is bad

    config.optimizer = ConfigDict()
    config.optimizer.name = "stable_adamw"  # stable_adamw | adamw
    config.optimizer.learning_rate = 2e-3  # peak
    config.optimizer.b1 = 0.9  # decay of the first moment
    config.optimizer.b2 = 0.99  # decay of the second moment
    config.optimizer.b2_power = 0.0  # stable_adamw: b2 = 1 - t^-this in its place; 0: off
    config.optimizer.eps = 1e-6  # floor of the second moment's root
    config.optimizer.weight_decay = 0.2  # of matrices, but not of positions
    config.optimizer.clip_threshold = 1.0  # stable_adamw: RMS from which an update shrinks; 0: off
    config.optimizer.grad_clip_norm = 0.0  # the alternative: a bound on the gradient's norm; 0: off
    # float16 needs a scaled loss: per_tensor (a fixed scale; a tensor with a non-finite gradient skips the
    # step alone) | dynamic (all tensors skip it, and the scale halves) | "": off.
    config.optimizer.loss_scaling = ""
    config.optimizer.loss_scale = 65536.0  # fixed, or the first
    config.optimizer.loss_scale_growth_steps = 2000  # dynamic: good steps until it doubles
    config.optimizer.freeze = ()  # parameters whose path one of these regular expressions finds

    config.schedule = ConfigDict()
    # After the linear warm-up: cosine | linear | constant | wsd (stable, then a decay by 1 - sqrt) | rsqrt
    # (inverse square root, then a linear decay).
    config.schedule.name = "cosine"
    config.schedule.floor = 0.0  # the last learning rate / the peak; not of constant
    config.schedule.decay = 0.1  # the share of the run at its end in which wsd and rsqrt decay
    config.schedule.warmup_steps = 0  # set one of the three; all 0: no warm-up
    config.schedule.warmup_epochs = 0.0  # warm-up in epochs; 0: not set
    config.schedule.warmup_examples = 0  # warm-up in examples; 0: not set

    config.train = ConfigDict()
    config.train.batch_size = 128  # pairs a step, over all devices
    config.train.steps = 1000  # set one of the three, the others to 0
    config.train.epochs = 0.0  # duration in epochs; 0: not set
    config.train.examples = 0  # duration in examples; 0: not set
    config.train.accumulation = 1  # micro-batches a step; the loss still contrasts the whole batch
    config.train.loss = "softmax"  # softmax (CLIP) | sigmoid (SigLIP)
    # Dtype in which devices all-reduce the gradients of the blocks' kernels: float32 | bfloat16.
    config.train.reduce_dtype = "float32"
    # Whether replicated gradients are all-reduced at once after the backward pass, or, if False, layer by
    # layer during it, for a network slower than NVLink.
    config.train.reduce_once = True
    config.train.ema_decay = 0.0  # averages the parameters, and evaluates the average; 0: off
    # What to do when a value is not finite, from the batch to the update: stop | skip (the step; stop if
    # it is a parameter, or after 50 skipped steps in a row) | rollback (to the last checkpoint, past the
    # data since).
    config.train.nan_policy = "stop"
    config.train.seed = 0  # of parameters, data order, augmentation and dropout
    config.train.compilation_cache = ".cache/jax"  # directory; "": compile every time
    # The first and the last step of a trace of the devices in WORKDIR/profile, as in 100,105; (): no trace.
    config.train.profile_steps = ()

    config.eval = ConfigDict()
    config.eval.data = ""  # data set, or part of the mixture, to evaluate on; "": that of training
    # Labelled sets for zero-shot classification, [NAME=]KIND:WHERE each, scored with the validation split:
    # folders:FOLDER | webdataset:TARS (with .cls) | table:FILE | parquet:FILES | tfds:BUILDER/SPLIT.
    # docs/evaluation.md
    config.eval.zeroshot = ()
    config.eval.every_steps = 0  # on the validation split; 0: only after the last step
    config.eval.batch_size = 256  # over all devices
    config.eval.captions_per_image = 5  # the first so many, for retrieval; 0: all

    config.mesh = ConfigDict()  # devices along each axis
    # The batch is sharded, the parameters are replicated; -1 on one axis: all devices that are left.
    config.mesh.data = -1
    config.mesh.fsdp = 1  # the batch and the parameters are sharded
    config.mesh.tensor = 1  # the width of the layers is sharded

    config.checkpoint = ConfigDict()
    config.checkpoint.every_steps = 0  # 0: only after the last step and when interrupted
    config.checkpoint.keep = 2  # the newest ones
    config.checkpoint.resume = ""  # a workdir whose run is continued here, if this one has none
    # Gives the first parameters only: a workdir, or weights of open_clip, OpenAI, Hugging Face or
    # big_vision (the file or its folder, a path or an fsspec address). docs/fine_tuning.md
    config.checkpoint.init_from = ""
    # An fsspec address, such as gs://bucket/run, to which the run is copied while it trains, and from which
    # it is continued where the workdir has no newer checkpoint; "": off.
    config.checkpoint.mirror = ""

    config.log = ConfigDict()
    config.log.every_steps = 20  # how often metrics are fetched and written, each step's
    config.log.tensorboard = True  # in WORKDIR/tensorboard
    config.log.wandb = ""  # Weights & Biases project; "": off

    config.diagnostics = ConfigDict()  # docs/diagnostics.md
    config.diagnostics.rms = True  # RMS of every tensor's update, each step
    config.diagnostics.features = True  # mean and maximum |x| of every block's output, each step
    config.diagnostics.norms = True  # of the update, each step; the gradient's is always logged
    # Of each quantized operand the zeros, saturated values and SQNR, every so many steps; 0: never.
    config.diagnostics.every_steps = 200

    config.report = ConfigDict()
    config.report.enabled = True  # writes WORKDIR/report/index.html at the end

    return config.lock()


def paper(model: str, recipe: str) -> ConfigDict:
    """Returns the training recipe of arXiv 2304.13013 for one of its models, in bfloat16.

    Args:
      model: vit_b32 | vit_b16 | vit_l14 | vit_h14.
      recipe: what the linear layers compute in.
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
