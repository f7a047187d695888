"""Arguments of command lines."""

import os
import re
from collections.abc import Sequence


def expand_home(arguments: Sequence[str]) -> list[str]:
    """Replaces ~ by the home directory in the values of flags, such as --workdir=~/runs/x.

    Shells expand ~ only at the beginning of an argument. It is also replaced where a further path can begin
    in a value: after a colon, a comma, an opening brace or a double quote.

    >>> home = os.path.expanduser("~")
    >>> expanded = expand_home(["--workdir=~/run", "--data=pets=folders:~/pets", "--page=a~/b"])
    >>> [argument.replace(home, "HOME") for argument in expanded]
    ['--workdir=HOME/run', '--data=pets=folders:HOME/pets', '--page=a~/b']
    """
    home = os.path.expanduser("~")

    def expand(argument: str) -> str:
        flag = argument.startswith("--")
        return re.sub(r'(?<=[=:,{"])~(?=/|$)', lambda _: home, argument) if flag else argument

    return [expand(argument) for argument in arguments]
