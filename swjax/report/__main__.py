"""`swjax report WORKDIR`: rewrites the report of a run and prints its path."""

import argparse
import sys

from swjax.report import write


def main() -> int:
    parser = argparse.ArgumentParser(prog="swjax report", description=__doc__)
    parser.add_argument("workdir", help="directory of a run: the --workdir of train.py")
    try:
        print(write(parser.parse_args().workdir))
    except ModuleNotFoundError as error:
        print(f"swjax.report: {error}: pip install 'swjax[train]'", file=sys.stderr)
        return 2
    except ValueError as error:
        print(f"swjax.report: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
