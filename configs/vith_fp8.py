"""CLIP ViT-H/14 in fp8 with SwitchBack (e4m3 forward, e5m2 gradients).

Command:  python train.py --config=configs/vith_fp8.py --workdir=runs/vith_fp8
Hardware: estimated, not run at this size: 64 GPUs of 80 GB, 256 pairs each, with sharded
          parameters. With fewer GPUs set --config.train.accumulation=N, which keeps the loss, or a
          smaller --config.train.batch_size.
Data:     synthetic, for benchmarks; --config.data.name chooses another.
"""

from ml_collections import ConfigDict

from configs import common


def get_config() -> ConfigDict:
    """Returns the config."""
    config = common.paper("vit_h14", recipe="fp8_switchback")
    return config
