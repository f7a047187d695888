"""Optional packages, which an extra such as swjax[train] installs, and which are imported at first use."""

import importlib.util


class MissingPackage(ModuleNotFoundError):
    """An optional package is not installed; the message names the remedy."""


def require(*modules: str, extra: str = "train", user: str = "swjax.data") -> None:
    """Raises a one-line MissingPackage if a module is not installed.

    Args:
      *modules: top-level modules.
      extra: the extra of swjax that installs them.
      user: what needs them, for the message.

    >>> require("json", "no_such_module")
    Traceback (most recent call last):
    swjax.packages.MissingPackage: swjax.data needs no_such_module: pip install "swjax[train]"
    """
    for module in modules:
        if importlib.util.find_spec(module) is None:
            raise MissingPackage(
                f'{user} needs {module}: pip install "swjax[{extra}]"', name=module
            )
