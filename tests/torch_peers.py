"""PyTorch and the CLIPs written in it, to compare with where they are installed.

Tests that need them begin with `torch_peers.load()`, which skips the module, visibly, where they are not.
"""

import importlib
import sys
import types
import warnings

import pytest

INSTALL = "needs PyTorch and its CLIPs: pip install 'swjax[torch]'"


def load() -> types.SimpleNamespace:
    """The modules torch, torchvision, open_clip and transformers, by name."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            import torch
        except ModuleNotFoundError:
            pytest.skip(INSTALL, allow_module_level=True)
        found = {"torch": torch, "torchvision": _torchvision(torch)}
        # transformers looks for a package named kernels, and in a checkout would find ours.
        sys.modules.setdefault("kernels", None)
        try:
            for name in ("open_clip", "transformers", "transformers.models.clip.modeling_clip"):
                found[name] = importlib.import_module(name)  # the last would else wait for its use
        except ModuleNotFoundError as error:
            pytest.skip(f"{INSTALL} ({error})", allow_module_level=True)
    torch.set_num_threads(1)  # the tensors are small
    return types.SimpleNamespace(**found)


def _torchvision(torch):
    """torchvision, whose compiled part may be for another build of PyTorch than this one.

    The registry's wheel is for CUDA. Beside a PyTorch for CPUs its compiled operators do not load, and
    the import fails over describing them. None is used here.
    """
    describe = torch.library.register_fake
    try:
        torch.library.register_fake = lambda name, *args, **kwargs: lambda function: function
        import torchvision
    except ModuleNotFoundError as error:
        pytest.skip(f"{INSTALL} ({error})", allow_module_level=True)
    finally:
        torch.library.register_fake = describe
    return torchvision
