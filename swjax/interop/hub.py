"""Weights by name: models of the Hugging Face hub, and open_clip's names for them.

A name is "ViT-B-32/laion2b_s34b_b79k" (open_clip's architecture and tag), "hf-hub:laion/NAME" or
"google/NAME", each optionally followed by "@REVISION". A model in the local cache is used as it is; otherwise
the package huggingface_hub downloads it into the cache.
"""

import contextlib
import os
import re
from pathlib import Path
from typing import NamedTuple

from swjax.data import hub_cache
from swjax.interop import weight_files
from swjax.packages import MissingPackage, require
from swjax.safe_files import one_line

# {architecture: {tag: repository}}: open_clip's names of the models that swjax can load.
_TIMM = "timm/vit_{}_clip_{}.{}"
_SIGLIPS = (
    *(f"B-16-SigLIP{size}" for size in ("", "-256", "-i18n-256", "-384", "-512")),
    *(f"L-16-SigLIP-{size}" for size in (256, 384)),
    *("SO400M-14-SigLIP", "SO400M-14-SigLIP-384", "B-32-SigLIP2-256"),
    *(f"B-16-SigLIP2{size}" for size in ("", "-256", "-384", "-512")),
    *(f"{size}-16-SigLIP2-{side}" for size in ("L", "SO400M") for side in (256, 384, 512)),
    *("SO400M-14-SigLIP2", "SO400M-14-SigLIP2-378"),
    *(f"gopt-16-SigLIP2-{size}" for size in (256, 384)),
)
OPEN_CLIP: dict[str, dict[str, str]] = {
    "ViT-B-32": {
        "openai": _TIMM.format("base_patch32", 224, "openai"),
        "laion400m_e31": _TIMM.format("base_patch32", 224, "laion400m_e31"),
        "laion400m_e32": _TIMM.format("base_patch32", 224, "laion400m_e32"),
        "laion2b_e16": _TIMM.format("base_patch32", 224, "laion2b_e16"),
        "laion2b_s34b_b79k": "laion/CLIP-ViT-B-32-laion2B-s34B-b79K",
        "datacomp_xl_s13b_b90k": "laion/CLIP-ViT-B-32-DataComp.XL-s13B-b90K",
        "datacomp_m_s128m_b4k": "laion/CLIP-ViT-B-32-DataComp.M-s128M-b4K",
        "metaclip_400m": _TIMM.format("base_patch32", 224, "metaclip_400m"),
        "metaclip_fullcc": _TIMM.format("base_patch32", 224, "metaclip_2pt5b"),
    },
    "ViT-B-32-256": {"datacomp_s34b_b86k": "laion/CLIP-ViT-B-32-256x256-DataComp-s34B-b86K"},
    "ViT-B-16": {
        "openai": _TIMM.format("base_patch16", 224, "openai"),
        "laion400m_e31": _TIMM.format("base_patch16", 224, "laion400m_e31"),
        "laion400m_e32": _TIMM.format("base_patch16", 224, "laion400m_e32"),
        "laion2b_s34b_b88k": "laion/CLIP-ViT-B-16-laion2B-s34B-b88K",
        "datacomp_xl_s13b_b90k": "laion/CLIP-ViT-B-16-DataComp.XL-s13B-b90K",
        "datacomp_l_s1b_b8k": "laion/CLIP-ViT-B-16-DataComp.L-s1B-b8K",
        "dfn2b": "apple/DFN2B-CLIP-ViT-B-16",
        "metaclip_400m": _TIMM.format("base_patch16", 224, "metaclip_400m"),
        "metaclip_fullcc": _TIMM.format("base_patch16", 224, "metaclip_2pt5b"),
    },
    "ViT-L-14": {
        "openai": _TIMM.format("large_patch14", 224, "openai"),
        "laion400m_e31": _TIMM.format("large_patch14", 224, "laion400m_e31"),
        "laion400m_e32": _TIMM.format("large_patch14", 224, "laion400m_e32"),
        "laion2b_s32b_b82k": "laion/CLIP-ViT-L-14-laion2B-s32B-b82K",
        "datacomp_xl_s13b_b90k": "laion/CLIP-ViT-L-14-DataComp.XL-s13B-b90K",
        "dfn2b": "apple/DFN2B-CLIP-ViT-L-14",
        "dfn2b_s39b": "apple/DFN2B-CLIP-ViT-L-14-39B",
        "metaclip_400m": _TIMM.format("large_patch14", 224, "metaclip_400m"),
        "metaclip_fullcc": _TIMM.format("large_patch14", 224, "metaclip_2pt5b"),
    },
    "ViT-L-14-336": {"openai": _TIMM.format("large_patch14", 336, "openai")},
    "ViT-H-14": {
        "laion2b_s32b_b79k": "laion/CLIP-ViT-H-14-laion2B-s32B-b79K",
        "metaclip_fullcc": _TIMM.format("huge_patch14", 224, "metaclip_2pt5b"),
        "metaclip_altogether": _TIMM.format("huge_patch14", 224, "metaclip_altogether"),
        "dfn5b": "apple/DFN5B-CLIP-ViT-H-14",
    },
    "ViT-H-14-378": {"dfn5b": "apple/DFN5B-CLIP-ViT-H-14-378"},
    "ViT-g-14": {
        "laion2b_s12b_b42k": "laion/CLIP-ViT-g-14-laion2B-s12B-b42K",
        "laion2b_s34b_b88k": "laion/CLIP-ViT-g-14-laion2B-s34B-b88K",
    },
    "ViT-bigG-14": {
        "laion2b_s39b_b160k": "laion/CLIP-ViT-bigG-14-laion2B-39B-b160k",
        "metaclip_fullcc": _TIMM.format("gigantic_patch14", 224, "metaclip_2pt5b"),
    },
    **{f"ViT-{size}": {"webli": f"timm/ViT-{size}"} for size in _SIGLIPS},
}


class _Library(NamedTuple):
    """The files of a library: its config, its weights, the preferred first, and what may be missing."""

    config: str
    weights: tuple[str, ...]
    others: tuple[str, ...] = ()


_FILES = {
    "open_clip": _Library(
        "open_clip_config.json",
        ("open_clip_model.safetensors", "open_clip_pytorch_model.bin"),
        ("tokenizer.json",),
    ),
    "huggingface": _Library(
        "config.json",
        (
            "model.safetensors",
            "model.safetensors.index.json",
            "pytorch_model.bin",
            "pytorch_model.bin.index.json",
        ),
        ("preprocessor_config.json", "tokenizer.json", "spiece.model"),
    ),
}
_NAME = re.compile(r"(hf-hub:)?([\w-][\w.-]*)/([\w-][\w.-]*?)(?:@([\w-][\w.-]*))?")
_FILE = re.compile(r".*\.(safetensors|npz|bin|pt|pth|ckpt|json)")


class Model(NamedTuple):
    """A model of the hub.

    Attributes:
      repository: such as "google/siglip-base-patch16-224".
      revision: branch, tag or commit.
      library: a key of `_FILES`, the library whose files are expected.
    """

    repository: str
    revision: str
    library: str


def named(address: str | Path) -> Model | None:
    """Returns the model that an address names, or None if it is a path.

    >>> named("ViT-B-32/openai").repository, named("google/siglip-base-patch16-224@main").library
    ('timm/vit_base_patch32_clip_224.openai', 'huggingface')
    >>> named("ViT-H-14-quickgelu/dfn5b").repository, named("ViT-B-16-SigLIP2/webli").repository
    ('apple/DFN5B-CLIP-ViT-H-14', 'timm/ViT-B-16-SigLIP2')
    >>> named("./weights/mine"), named("mine.safetensors"), named("gs://bucket/mine")
    (None, None, None)
    """
    text = str(address)
    found = _NAME.fullmatch(text)
    if Path(text).exists() or not found or _FILE.fullmatch(text):
        return None
    prefix, owner, name, revision = found.groups()
    if not prefix and Path(owner).is_dir():  # a mistyped path
        return None
    # Models named "-quickgelu" have the same weights, whose config names the activation.
    architecture = owner.removesuffix("-quickgelu")
    repository = OPEN_CLIP.get(architecture, {}).get(name) if not prefix else None
    open_clip = prefix or repository or owner == "timm"
    library = "open_clip" if open_clip else "huggingface"
    return Model(repository or f"{owner}/{name}", revision or "main", library)


def resolve(address: str | Path) -> Path:
    """Returns the local path of weights: that of a named model in the cache, else the address itself.

    Raises:
      ValueError: the model is not in the cache and cannot be downloaded, or has no weights that swjax reads.
    """
    model = named(address)
    if model is None:
        return Path(address)
    return _cached(model) or _downloaded(model)


def _cached(model: Model) -> Path | None:
    """The folder of the cache that holds all files of the model, or None."""
    snapshot = hub_cache.snapshot(model.repository, model.revision)
    for files in _FILES.values():
        weights = next(
            (snapshot / name for name in files.weights if (snapshot / name).is_file()), None
        )
        if not (snapshot / files.config).is_file() or weights is None:
            continue
        if all((snapshot / name).is_file() for name in weight_files.shards(weights)):
            return snapshot
    return None


def _downloaded(model: Model) -> Path:
    try:
        require("huggingface_hub", extra="hub", user=f"downloading {model.repository}")
    except MissingPackage as error:
        raise ValueError(f"{_absent(model)}; {error}") from error
    from huggingface_hub import errors, hf_hub_download

    if not hub_cache.is_reachable():
        raise ValueError(_absent(model))

    def get(name: str) -> Path:
        path = hf_hub_download(
            model.repository,
            name,
            revision=model.revision,
            cache_dir=hub_cache.folder(),
            endpoint=os.environ.get("HF_ENDPOINT"),
            local_files_only=hub_cache.is_offline(),
        )
        return Path(path)

    try:
        for files in _FILES.values():
            with contextlib.suppress(errors.RemoteEntryNotFoundError):
                get(files.config)
                for name in files.weights:
                    with contextlib.suppress(errors.RemoteEntryNotFoundError):
                        path = get(name)
                        break
                else:
                    continue
                for name in weight_files.shards(path):
                    get(name)
                for name in files.others:
                    with contextlib.suppress(errors.RemoteEntryNotFoundError):
                        get(name)
                return path.parent
    except (errors.RepositoryNotFoundError, errors.RevisionNotFoundError) as error:
        raise ValueError(
            f"there is no such path, and the hub shows no model {model.repository} of revision "
            f"{model.revision}: check the name; if it is private or needs a consent, run `hf auth login`"
        ) from error
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled) as error:
        raise ValueError(_absent(model)) from error
    except OSError as error:  # of the network or the disk
        reason = one_line(error)
        raise ValueError(f"{_absent(model)} ({type(error).__name__}: {reason:.120})") from error
    raise ValueError(
        f"the model {model.repository} of the hub has no complete weights of open_clip or transformers, such "
        "as config.json and model.safetensors: choose another"
    )


def _absent(model: Model) -> str:
    files, name = _FILES[model.library], model.repository.rpartition("/")[2]
    wanted = " ".join((files.config, files.weights[0], *files.others))
    revision = f" --revision {model.revision}" if model.revision != "main" else ""
    return (
        f"there is no such path, and Hugging Face's cache {hub_cache.folder()} does not hold all files of "
        f"{model.repository}: where there is a network, run `hf download {model.repository} {wanted}"
        f"{revision} --local-dir weights/{name}`, and give the path of that folder"
    )
