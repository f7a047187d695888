"""The test files of optax and Flax, which part of swjax each of them tests, and how to run one."""

import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
OPTAX = Path(find_spec("optax").origin).parent  # optax's wheel contains its tests
FLAX = next(iter(sorted((ROOT / ".cache" / "peers").glob("flax-*/tests"))), None)  # `make peers`


class Suite(NamedTuple):
    """A test file.

    Attributes:
      library: "optax" or "flax".
      file: path below the library's tests.
      substitution: see `substitution.py`.
      select: regular expression on the tests' parameters; "": all tests.
    """

    library: str
    file: str
    substitution: str
    select: str = ""

    @property
    def path(self) -> Path | None:
        folder = {"optax": OPTAX, "flax": FLAX}[self.library]
        return folder / self.file if folder else None

    def __str__(self) -> str:
        return f"{self.library}/{self.file} with {self.substitution}"


OPTIMIZERS = "'(adam|adamw|sgd|rmsprop)'"
SUITES = [
    Suite("optax", file, part, select)
    for part in ("stable_adamw", "per_tensor_guard", "dynamic_loss_scale")
    for file, select in {
        "_src/alias_test.py": OPTIMIZERS,
        "_src/combine_test.py": "",
        "_src/float64_test.py": "",
        "_src/lookahead_test.py": "",
        "_src/sharding_test.py": "",
        "contrib/_common_test.py": "",
        "contrib/_sam_test.py": "",
        "contrib/_schedule_free_test.py": "",
        "schedules/_inject_test.py": "",
        "transforms/_accumulation_test.py": "",
        "transforms/_combining_test.py": "",
        "transforms/_conditionality_test.py": "",
        "transforms/_freezing_test.py": "",
        "transforms/_masking_test.py": "",
        "tree_utils/_state_utils_test.py": "",
    }.items()
] + [
    *(
        Suite("flax", file, "linen")
        for file in (
            "checkpoints_test.py",
            "linen/linen_attention_test.py",
            "linen/linen_linear_test.py",
            "linen/linen_module_test.py",
            "linen/linen_transforms_test.py",
            "pickle_test.py",
            "serialization_test.py",
        )
    ),
    *(
        Suite("flax", file, "nnx")
        for file in (
            "nnx/bridge/wrappers_test.py",
            "nnx/graph_utils_test.py",
            "nnx/integration_test.py",
            "nnx/module_test.py",
            "nnx/nn/attention_test.py",
            "nnx/nn/linear_test.py",
            "nnx/optimizer_test.py",
            "nnx/partitioning_test.py",
            "nnx/transforms_test.py",
        )
    ),
]


def outcomes(suite: Suite, *, substitute: bool = True) -> dict[str, str]:
    """Runs all tests of a file; returns {test: "passed", "skipped", or the first line of its error}.

    Args:
      suite: its file must exist.
      substitute: False: with the library's own parts, to find tests that fail without swjax.
    """
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        options = ["-q", "-p", "no:cacheprovider", "-p", "substitution", f"--junitxml={report}"]
        options += ["-c", os.devnull, f"--rootdir={folder}"]
        # Without the JAX settings of swjax's tests: the libraries' tests expect JAX's defaults.
        environment = {k: v for k, v in os.environ.items() if not k.startswith(("JAX_", "PYTEST_"))}
        environment |= {
            "JAX_PLATFORMS": "cpu",
            "PYTHONPATH": os.pathsep.join([str(HERE), str(ROOT)]),
            "SWJAX_SELECT": suite.select,
            "SWJAX_SUBSTITUTION": suite.substitution if substitute else "nothing",
            "XLA_FLAGS": "",
        }
        done = subprocess.run(
            [sys.executable, "-m", "pytest", *options, str(suite.path)],
            env=environment,
            cwd=folder,
            capture_output=True,
            text=True,
        )
        if not report.exists():
            raise RuntimeError(done.stdout[-2000:] + done.stderr[-2000:])
        cases = ElementTree.parse(report).getroot().iter("testcase")
        return {f"{case.get('classname')}::{case.get('name')}": _outcome(case) for case in cases}


def _outcome(case: ElementTree.Element) -> str:
    for kind in ("failure", "error"):
        found = case.find(kind)
        if found is not None:
            return (found.get("message") or kind).splitlines()[0][:200]
    return "passed" if case.find("skipped") is None else "skipped"
