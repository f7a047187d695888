"""SigLIP 2's ViT-B/16, its sigmoid loss alone, in int8; hyperparameters of arXiv 2502.14786 and 2303.15343.

Command:  hf download google/siglip2-base-patch16-256 tokenizer.json --local-dir data/siglip2
          python train.py --config=configs/siglip2.py --workdir=runs/siglip2
Hardware: estimated, not run at this size: 64 GPUs of 80 GB. With fewer GPUs set
          --config.train.accumulation=N, which keeps the loss, or a smaller --config.train.batch_size.
Data:     synthetic, for benchmarks; --config.data.name chooses another.
Without:  the captioning decoder (LocCa), self-distillation and masked prediction, the curation of the data,
          and pictures of several shapes (NaFlex). Weight decay includes the token embedding.
"""

from ml_collections import ConfigDict

from configs import common


def get_config() -> ConfigDict:
    """Returns the config."""
    config = common.get_config()
    config.model.name = "vit_b16"
    config.model.architecture = "siglip"
    config.model.gelu = "tanh"
    config.model.vision.resize_mode = "squash"
    config.model.text.width = 768
    config.model.text.heads = 12
    config.model.text.vocab_size = 256_000  # Gemma's
    config.data.tokenizer = "data/siglip2/tokenizer.json"
    config.data.name = "synthetic"
    config.data.image_size = 256
    config.data.context_length = 64
    config.data.augment.drawings = False
    config.mesh.data = 1
    config.mesh.fsdp = -1  # docs/scaling.md
    config.optimizer.name = "adamw"
    config.optimizer.learning_rate = 1e-3
    config.optimizer.b2 = 0.95
    config.optimizer.eps = 1e-8
    config.optimizer.weight_decay = 0.1  # times the learning rate: 1e-4, as published
    config.optimizer.grad_clip_norm = 1.0
    config.schedule.warmup_steps = 20_000
    config.train.loss = "sigmoid"
    config.train.batch_size = 32_768
    config.train.steps = 0
    config.train.examples = 40_000_000_000
    config.checkpoint.every_steps = 1000
    config.eval.every_steps = 10_000
    config.eval.batch_size = 1024
    return config
