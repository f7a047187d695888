"""CLIP on 330,000 drawings of open-source icon sets, at the width and depth of ViT-B, in int8.

Command:  npm pack @iconify/json@2.2.535 --pack-destination data
          python train.py --config=configs/icons.py --workdir=runs/icons
          with --config=configs/icons.py:slice a small CLIP learns 15,000 of the drawings
Hardware: 1 GPU of 80 GB and 16 CPU cores. The slice: any CPU, 20 minutes on 2 cores.
The settings are those of benchmarks/studies/icons.py, whose models name 28 to 35 % of 5,275 unseen names.
"""

from ml_collections import ConfigDict

from configs import common


def get_config(data: str = "full") -> ConfigDict:
    """Returns the config; `data` is "full" or "slice"."""
    config = common.get_config()
    config.data.name = "icons"
    config.data.icons.config = data or "full"
    config.eval.captions_per_image = 1  # the name
    config.eval.batch_size = 1024
    if data == "slice":
        config.model.dtype = "float32"  # a CPU is slow at bfloat16
        config.model.gelu = "tanh"  # and at erf
        config.optimizer.weight_decay = 0.1
        config.schedule.warmup_steps = 300
        config.train.batch_size = 256
        config.train.steps = 1500
        config.checkpoint.every_steps = 300
        config.eval.every_steps = 300
        return config
    config.model.name = "vit_b16"
    config.model.vision.patch_size = 8  # 64 patches of a drawing of 64 pixels
    config.model.patch_dropout = 0.5
    config.optimizer.learning_rate = 5e-4
    config.optimizer.b2 = 0.98
    config.schedule.warmup_steps = 720  # a shorter warm-up collapses the embeddings
    config.train.batch_size = 2048
    config.train.steps = 2400
    config.checkpoint.every_steps = 400
    config.eval.every_steps = 400
    return config
