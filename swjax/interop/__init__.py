"""Loads and saves CLIP weights in the layouts of open_clip, OpenAI and Hugging Face.

Files are safetensors or those of PyTorch, whose pickles are not run. `load` returns a
`swjax.models.clip.CLIP`; `read` returns its configuration and its parameters on the host, `configuration`
only the former. `open_clip.create_model("local-dir:...")` and transformers' `CLIPModel.from_pretrained` can
open the output of `save`.
"""

from swjax.interop.files import NoConfig, configuration, load, read, save

__all__ = ["NoConfig", "configuration", "load", "read", "save"]
