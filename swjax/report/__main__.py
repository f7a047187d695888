"""`swjax report WORKDIR`: rewrites the report of a run and prints its path."""

import argparse
import sys
from pathlib import Path

from swjax.report import write
from swjax.safe_files import explain

FILES = ("config.json", "metrics.jsonl")


def main() -> int:
    parser = argparse.ArgumentParser(prog="swjax report", description=__doc__)
    parser.add_argument("workdir", help="directory of a run: the --workdir of train.py")
    workdir = Path(parser.parse_args().workdir)
    try:
        if workdir.is_dir() and not any((workdir / name).exists() for name in FILES):
            raise ValueError(f"{workdir} is not a run: it has neither {' nor '.join(FILES)}")
        print(write(workdir))
    except (ValueError, OSError) as error:
        print(f"swjax report: {explain(error)}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
