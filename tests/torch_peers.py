"""PyTorch and its CLIP libraries, for comparison if they are installed.

Tests that need them call `torch_peers.load()`, which skips them, with a reason, if they are not.
"""

import importlib
import sys
import types
import warnings

import pytest

INSTALL = "needs PyTorch and its CLIPs: pip install 'swjax[torch]'"


def load() -> types.SimpleNamespace:
    """Returns the modules torch, torchvision, open_clip and transformers by name."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = torch_and_torchvision()
        # transformers imports a package named kernels if there is one, and would find the checkout's.
        sys.modules.setdefault("kernels", None)
        try:
            for name in ("open_clip", "transformers", "transformers.models.clip.modeling_clip"):
                found[name] = importlib.import_module(name)  # the last is imported lazily
        except ModuleNotFoundError as error:
            pytest.skip(f"{INSTALL} ({error})", allow_module_level=True)
    found["torch"].set_num_threads(1)  # the tensors are small
    return types.SimpleNamespace(**found)


def torch_and_torchvision() -> dict[str, types.ModuleType]:
    """Imports both, torchvision without its compiled operators.

    Those of the wheel for CUDA do not load with a PyTorch for CPUs, and registering them fails. The tests use
    none of them.
    """
    try:
        import torch
    except ModuleNotFoundError:
        pytest.skip(INSTALL, allow_module_level=True)
    describe = torch.library.register_fake
    try:
        torch.library.register_fake = lambda name, *args, **kwargs: lambda function: function
        import torchvision
    except ModuleNotFoundError as error:
        pytest.skip(f"{INSTALL} ({error})", allow_module_level=True)
    finally:
        torch.library.register_fake = describe
    return {"torch": torch, "torchvision": torchvision}
