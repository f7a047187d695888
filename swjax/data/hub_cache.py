"""Hugging Face's cache of models and data sets, without its packages."""

import os
import socket
from pathlib import Path
from urllib.parse import urlsplit

_SECONDS = 10  # to connect


def folder() -> Path:
    """The folder in which huggingface_hub keeps what it downloads."""
    if os.environ.get("HF_HUB_CACHE"):
        return Path(os.environ["HF_HUB_CACHE"]).expanduser()
    general = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface"
    return (Path(os.environ.get("HF_HOME") or general) / "hub").expanduser()


def snapshot(repository: str, revision: str = "main", kind: str = "models") -> Path:
    """The folder of the cache for a revision of a repository, whether it exists or not.

    Args:
      repository: such as "google/siglip-base-patch16-224".
      revision: branch, tag or commit.
      kind: "models" or "datasets".
    """
    home = folder() / f"{kind}--{repository.replace('/', '--')}"
    commit = home / "refs" / revision
    return home / "snapshots" / (commit.read_text().strip() if commit.is_file() else revision)


def is_offline() -> bool:
    """Whether the environment forbids downloads."""
    return os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE")


def is_reachable() -> bool:
    """Whether a connection to the hub is possible: huggingface_hub tries for half a minute, with warnings."""
    proxies = ("HTTPS_PROXY", "https_proxy", "HTTP_PROXY", "http_proxy")
    if any(map(os.environ.get, proxies)):
        return True  # the proxy decides
    try:
        url = urlsplit(os.environ.get("HF_ENDPOINT") or "https://huggingface.co")
        port = url.port or (443 if url.scheme == "https" else 80)
        with socket.create_connection((url.hostname or "", port), timeout=_SECONDS):
            return True
    except (OSError, ValueError):
        return False
