"""The default run: a tiny CLIP learns emoji drawings and their names, in int8 with SwitchBack.

Command:  python train.py --config=configs/openmoji.py --workdir=runs/openmoji
          with --config=configs/openmoji.py:strict no drawing of the test style is trained on
Hardware: any CPU; minutes on 2 cores.
"""

from ml_collections import ConfigDict

from configs import common


def get_config(task: str = "mixed") -> ConfigDict:
    """Returns the config; `task` is "mixed" or "strict"."""
    config = common.get_config()
    config.data.emoji.task = task or "mixed"
    config.model.dtype = "float32"  # a CPU is slow at bfloat16
    config.model.gelu = "tanh"  # and at erf
    config.optimizer.weight_decay = 0.1
    config.schedule.warmup_steps = 300
    config.train.batch_size = 256
    config.train.steps = 750
    config.checkpoint.every_steps = 150
    config.eval.every_steps = 150
    config.eval.captions_per_image = 1  # the name
    return config
