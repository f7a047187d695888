"""Writes the model of a run for other libraries, or as programs that need jax alone.

python -m swjax export runs/openmoji exported --layout=huggingface
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from swjax import inference, interop
from swjax.safe_files import explain

# What opens the folder, by layout.
READERS = {
    "open_clip": "open_clip.create_model('local-dir:{folder}')",
    "huggingface": "transformers.CLIPModel.from_pretrained('{folder}')",
    "siglip": "transformers.SiglipModel.from_pretrained('{folder}')",
    "big_vision": "big_vision, as {folder}/model.npz",
    "programs": "jax.export.deserialize, as {folder}/encode_image.jax and encode_text.jax",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Exports a model and says what opens it.

    Args:
      arguments: arguments of the command line; None reads those of this process.

    Returns:
      The exit code: 0, or 2 if the model cannot be read or does not fit the layout.
    """
    parser = argparse.ArgumentParser(prog="swjax export", description=__doc__.splitlines()[0])
    parser.add_argument("model", help="a run's workdir, weights or their folder, or a name")
    parser.add_argument("folder", help="where to write; created if it is missing")
    parser.add_argument(
        "--layout",
        choices=READERS,
        help="default: siglip for a SigLIP, else open_clip; programs: StableHLO for CPUs and CUDA",
    )
    options = parser.parse_args(arguments)
    if not options.folder:
        parser.error("folder '' is empty: give where to write, . for the current folder")
    try:
        encoder = inference.load(options.model, implementation="xla", attention="xla")
        layout = options.layout or ("siglip" if encoder.cfg.siglip else "open_clip")
        if layout == "programs":
            inference.export(options.folder, encoder)
        else:
            interop.save(options.folder, encoder.model, layout, encoder.tokenizer)
    except (OSError, ValueError) as error:
        print(f"swjax export: {explain(error)}", file=sys.stderr)
        return 2
    print(f"opens in {READERS[layout].format(folder=Path(options.folder).as_posix())}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
