"""CLIP ViT-L/14 in int8 with SwitchBack.

Command:  python train.py --config=configs/vitl14_int8.py --workdir=runs/vitl14_int8
Hardware: estimated, not run at this size: 32 GPUs of 80 GB, 512 pairs each, with sharded
          parameters. With fewer GPUs set --config.train.accumulation=N, which keeps the loss, or a
          smaller --config.train.batch_size.
Others:   bf16 with --config.model.recipe=standard --config.model.remat=full; without remat it needs
          XLA_CLIENT_MEM_FRACTION=0.95 or fewer pairs per GPU. fp8 with
          --config.model.recipe=fp8_switchback.
Data:     synthetic, for benchmarks; --config.data.name chooses another.
"""

from ml_collections import ConfigDict

from configs import common


def get_config() -> ConfigDict:
    """Returns the config."""
    config = common.paper("vit_l14", recipe="switchback")
    return config
