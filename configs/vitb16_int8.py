"""CLIP ViT-B/16 in int8 with SwitchBack.

Command:  python train.py --config=configs/vitb16_int8.py --workdir=runs/vitb16_int8
Hardware: estimated, not run at this size: 16 GPUs of 80 GB. With fewer GPUs set
          --config.train.accumulation=N, which keeps the loss, or a smaller --config.train.batch_size.
Others:   bf16 with --config.model.recipe=standard, fp8 with --config.model.recipe=fp8_switchback.
Data:     synthetic, for benchmarks; --config.data.name chooses another.
"""

from ml_collections import ConfigDict

from configs import common


def get_config() -> ConfigDict:
    """Returns the config."""
    config = common.paper("vit_b16", recipe="switchback")
    return config
