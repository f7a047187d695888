"""Fine-tunes pretrained weights of open_clip, Hugging Face or others in int8 with SwitchBack.

The weights determine the model: its sizes, its activation, how pictures are prepared, and the loss.

Command:  python train.py --config=configs/finetune.py --workdir=runs/finetune
          --config.checkpoint.init_from=FOLDER --config.data.name=webdataset
          --config.data.webdataset.splits.train='pairs/*.tar'
          with --config=configs/finetune.py:lit the image tower is frozen (LiT); with :lora both
          towers are frozen in int8, and matrices of rank 16 are trained
Hardware: estimated, not run at this size: for a ViT-B/32, 1 GPU of 24 GB or more.
Data:     the emoji drawings, to try it; --config.data.name chooses another.
"""

from ml_collections import ConfigDict

from configs import common


def get_config(method: str = "all") -> ConfigDict:
    """Returns the config; `method` is "all", "lit", which trains the text tower alone, or "lora"."""
    if method not in ("", "all", "lit", "lora"):
        raise ValueError(f"the method must be all, lit or lora, got {method!r}")
    config = common.get_config()
    config.model.name = "weights"
    config.model.architecture = config.model.gelu = config.train.loss = ""
    config.data.image_size = config.data.context_length = 0
    config.schedule.warmup_steps = 100
    config.train.batch_size = 512
    config.train.steps = 2000
    config.checkpoint.every_steps = 500
    config.eval.every_steps = 250
    if method == "lit":
        config.optimizer.freeze = ("^vision/",)
        config.optimizer.learning_rate = 5e-4
    elif method == "lora":
        config.optimizer.lora.rank = 16
        config.optimizer.learning_rate = 5e-4
        config.optimizer.weight_decay = 0.0
    else:
        config.optimizer.learning_rate = 1e-5
        config.optimizer.weight_decay = 0.1
    return config
