"""Loads and saves CLIP weights in the layouts of open_clip, OpenAI and Hugging Face.

Files are safetensors; nothing is unpickled. `load` gives a `swjax.models.clip.CLIP`, `read` its
configuration and its parameters on the host. `save` writes what `open_clip.create_model("local-dir:...")` and
transformers' `CLIPModel.from_pretrained` open.
"""

from swjax.interop.files import NoConfig, load, read, save

__all__ = ["NoConfig", "load", "read", "save"]
