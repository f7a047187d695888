"""CLIP ViT-L/14 in bfloat16, the baseline.

Command:  python train.py --config=configs/vitl14_bf16.py --workdir=runs/vitl14_bf16
Hardware: estimated, not run at this size: 32 GPUs of 80 GB, 512 pairs each, with sharded
          parameters. With fewer GPUs set --config.train.accumulation=N, which keeps the loss, or a
          smaller --config.train.batch_size.
          Blocks are recomputed, unlike in int8. To compare the two, set --config.model.remat=none,
          which needs XLA_PYTHON_CLIENT_MEM_FRACTION=0.95 or fewer pairs per GPU.
Data:     synthetic, for benchmarks; --config.data.name chooses another.
"""

from ml_collections import ConfigDict

from configs import common


def get_config() -> ConfigDict:
    """Returns the config."""
    config = common.paper("vit_l14", recipe="standard")
    config.model.remat = "full"
    return config
