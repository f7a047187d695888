"""Loads and saves CLIP and SigLIP weights in the layouts of open_clip, OpenAI, Hugging Face and big_vision.

Files are safetensors, those of PyTorch, whose pickles are not run, or big_vision's .npz. `load` returns a
`swjax.models.clip.CLIP`; `read` returns its configuration and its parameters on the host, `configuration`
only the former. `open_clip.create_model("local-dir:...")` and transformers' `CLIPModel.from_pretrained` can
open the output of `save`.
"""

from swjax.interop.files import NoConfig, configuration, load, read, save, tokenizer

__all__ = ["NoConfig", "configuration", "load", "read", "save", "tokenizer"]
