"""CLIP ViT-H/14 in int8 with SwitchBack: the recipe of arXiv 2304.13013.

Command:  python train.py --config=configs/vith_int8.py --workdir=runs/vith_int8
Hardware: estimated, not run at this size: 64 GPUs of 80 GB, 256 pairs each (four H200 took 54.1 GiB
          each), parameters split over all; fewer with --config.train.accumulation=N, whose loss is
          the same, or with a smaller --config.train.batch_size.
Data:     synthetic, for benchmarks; --config.data.name chooses another.
"""

from ml_collections import ConfigDict

from configs import common


def get_config() -> ConfigDict:
    """Returns the config."""
    config = common.paper("vit_h14", recipe="switchback")
    return config
