"""``make others``: checks the conversion of published projects, each group in its own environment.

    python tests/others [NAME ...]      # names are parts of those of projects
    python tests/others --shares        # the share of FLOPs in int8 of whole models, see shares.py

It prints a table and exits with 1 if a project fails. The environments need Python 3.12, see `PYTHON`.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

from projects import ENVIRONMENTS, PROJECTS

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
CACHE = ROOT / ".cache" / "others"
SETTINGS = {
    "JAX_PLATFORMS": "cpu",
    "TF_CPP_MIN_LOG_LEVEL": "3",
    "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
    "PYTHONPATH": str(ROOT),
}
LONGEST = 900  # seconds of one project
# The newest jax and some projects need Python 3.12.
PYTHON = sys.executable if sys.version_info >= (3, 12) else shutil.which("python3.12")


def python_of(environment: str) -> Path:
    """The interpreter of an environment, which is made if its requirements changed."""
    folder, wanted = CACHE / environment, "\n".join(ENVIRONMENTS[environment])
    installed, python = folder / ".installed", folder / "bin" / "python"
    if not installed.exists() or installed.read_text() != wanted:
        print(f"installing into {folder.relative_to(ROOT)}: some minutes, once", flush=True)
        if PYTHON is None:
            sys.exit("make others needs Python 3.12, got none: put python3.12 on PATH")
        subprocess.run([PYTHON, "-m", "venv", "--clear", folder], check=True)
        pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        for arguments in ENVIRONMENTS[environment]:
            subprocess.run([*pip, *arguments.split()], check=True)
        installed.write_text(wanted)
    return python


def row_of(name: str) -> dict:
    """The row of a project, or its error."""
    command = [python_of(PROJECTS[name].environment), HERE / "check.py", name]
    try:
        done = subprocess.run(
            command, env=os.environ | SETTINGS, capture_output=True, text=True, timeout=LONGEST
        )
    except subprocess.TimeoutExpired:
        return {"project": name, "failed": f"it ran for more than {LONGEST} s"}
    if done.returncode:
        return {"project": name, "failed": done.stderr.strip().splitlines()[-1]}
    return json.loads(done.stdout.strip().splitlines()[-1])


def main() -> int:
    parts = sys.argv[1:]
    if parts == ["--shares"]:
        command = [python_of("tunix"), HERE / "shares.py"]
        return subprocess.run(command, env=os.environ | SETTINGS).returncode
    names = [n for n in PROJECTS if not parts or any(part.lower() in n.lower() for part in parts)]
    if not names:
        print(f"no project has {' or '.join(parts)} in its name: {'; '.join(PROJECTS)}")
        return 2
    print(
        "| project | version | forward FLOPs in int8 | worst gradient of a leaf |\n|---|---|---|---|"
    )
    rows = []
    for name in names:
        rows.append(row := row_of(name))
        cells = [name, row.get("version", "-"), row.get("failed", "")]
        if "failed" not in row:
            cells[2:] = [f"{row['share']:.1%}", f"{row['error']:.1%}"]
        print(f"| {' | '.join(cells)} |", flush=True)
    (CACHE / "rows.json").write_text(json.dumps(rows, indent=1))
    return int(any("failed" in row for row in rows))


if __name__ == "__main__":
    sys.exit(main())
