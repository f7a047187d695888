"""Optional packages of data sources, installed with swjax[train] and imported at first use."""

import importlib.util


def require(*modules: str, extra: str = "train") -> None:
    """Raises a one-line ModuleNotFoundError with the remedy if a module is not installed.

    >>> require("json", "no_such_module")
    Traceback (most recent call last):
    ModuleNotFoundError: swjax.data needs no_such_module: pip install "swjax[train]"
    """
    for module in modules:
        if importlib.util.find_spec(module) is None:
            raise ModuleNotFoundError(
                f'swjax.data needs {module}: pip install "swjax[{extra}]"', name=module
            )
