"""CLIP weights of others, in and out: open_clip's and OpenAI's layout, and Hugging Face's.

Files are safetensors; nothing is unpickled. `load` gives a `swjax.models.clip.CLIP`, `save` writes what
`open_clip.create_model("local-dir:...")` and transformers' `CLIPModel.from_pretrained` open.
"""

from swjax.interop.files import load, save

__all__ = ["load", "save"]
