"""Imports run one way, and what is slow to load is loaded by who needs it."""

import ast
import importlib.metadata
import itertools
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

# Each part of swjax, and the parts it may import, wherever the import stands in the file. The core comes
# first; only what stands below the line knows a run's config.
ALLOWED = {
    "kernels": set(),
    "fp8": {"kernels"},
    "recipes": {"kernels"},
    "checkpoint_policies": set(),
    "testing": set(),
    "prologues": {"kernels"},
    "partition": {"kernels"},
    "switchback": {"recipes", "kernels", "prologues", "partition"},
    "conversion": {"recipes"},
    "nnx": {"conversion", "switchback", "prologues", "recipes", "kernels", "partition"},
    "linen": {"conversion", "switchback", "recipes", "kernels", "partition"},
    "tensor_files": set(),
    "serving": {"linen", "nnx", "recipes", "switchback", "kernels", "tensor_files"},
    "swjax": {
        "switchback",
        "partition",
        "prologues",
        "recipes",
        "kernels",
        "checkpoint_policies",
    },  # its __init__
    "optax": set(),
    "attention": {"kernels", "partition"},
    "models": {"attention", "nnx", "prologues", "recipes", "checkpoint_policies"},
    "ring": {"partition"},
    "losses": {"partition", "ring"},
    "data": {"environment"},
    "sharding": set(),
    "diagnostics": {"optax", "nnx", "recipes", "kernels"},
    "evaluators": {"data", "sharding"},
    "interop": {"data", "models", "tensor_files"},
    "report": {"diagnostics"},
    "environment": set(),
    "interrupt": set(),
    "bench": {"attention", "environment", "swjax", "kernels"},
    # ---------------------------------------------------------------------------------
    "config": set(),
    "checkpoint": {"checksums", "config", "distributed"},
    "checksums": set(),
    "distributed": {"config"},
    "metrics": {"config", "diagnostics"},
    "train_step": {
        "config",
        "data",
        "diagnostics",
        "losses",
        "models",
        "optax",
        "sharding",
    },
    "inference": {
        *("checkpoint", "data", "evaluators", "interop", "models", "recipes", "serving"),
        "trainer",
    },
    "layer_errors": {"models", "nnx", "train_step"},
    "compare_precision": {
        *("config", "diagnostics", "environment", "layer_errors", "recipes", "report", "sharding"),
        *("train_step", "trainer"),
    },
    "trainer": {
        *("checkpoint", "config", "data", "diagnostics", "distributed", "environment"),
        *("evaluators", "interrupt"),
        *("metrics", "models", "nnx", "optax", "recipes", "report", "sharding", "train_step"),
    },
    "replay": {
        *("checkpoint", "config", "data", "diagnostics", "models", "sharding", "trainer"),
        "train_step",
    },
    "commands": {"diagnostics", "replay", "report"},
}


def part_of(module: str) -> str:
    """`swjax.optax.rms` belongs to the part `optax`; what times kernels is no kernel."""
    names = module.split(".")
    if module in ("swjax.__main__", "swjax.diagnostics.__main__"):
        return "commands"
    if names[1:2] == ["kernels"] and names[-1].startswith(("bench", "timing", "tune")):
        return "bench"
    return names[1] if len(names) > 1 else "swjax"


def modules():
    folders = [ROOT / "swjax", ROOT / "kernels"]
    for path in sorted(path for folder in folders for path in folder.rglob("*.py")):
        names = path.relative_to(ROOT).with_suffix("").parts
        names = names[:-1] if names[-1] == "__init__" else names
        if names[:2] == ("swjax", "kernels"):
            continue  # through the symlink
        yield ".".join(("swjax", *names) if names[0] == "kernels" else names), path


def imported(path: Path):
    """Names of the modules that a file imports: for `from swjax import x`, `swjax.x`."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            if node.module == "swjax":
                yield from (f"swjax.{alias.name}" for alias in node.names)
            else:
                yield node.module


MODULES = dict(modules())


def test_importing_asks_for_no_devices():
    """`jax.distributed` has to be initialized before the first question for devices."""
    code = "import swjax.trainer\nfrom jax._src import xla_bridge\nassert not xla_bridge._backends"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


@pytest.mark.parametrize("module", MODULES)
def test_imports_run_one_way(module):
    part = part_of(module)
    assert part in ALLOWED, f"say in ALLOWED what {part} may import"
    for name in imported(MODULES[module]):
        if name.split(".")[0] == "swjax" and part_of(name) != part:
            assert part_of(name) in ALLOWED[part], f"{module} imports {name}"


def test_allowed_directions_have_no_cycle():
    done: set[str] = set()
    while len(done) < len(ALLOWED):
        ready = {part for part, others in ALLOWED.items() if others <= done} - done
        assert ready, f"cycle among {set(ALLOWED) - done}"
        done |= ready


CORE = {"kernels", "fp8", "recipes", "checkpoint_policies", "testing", "prologues", "switchback"}
CORE |= {
    "partition",
    "conversion",
    "nnx",
    "linen",
    "swjax",
    "optax",
    "attention",
    "models",
    "losses",
    "ring",
    "sharding",
    "diagnostics",
}
# Loaded when an NVIDIA GPU is there.
NEEDS_EXTRA = {"swjax.kernels.triton_gpu", "swjax.kernels.triton_attention"}


BENCHMARKED = {"open_clip", "open_clip_train", "torch"}  # by what the extra bench installs


def test_what_is_imported_is_required():
    """A package that is only here by chance is missing elsewhere: the core's in `dependencies`."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    required = {
        "core": names_of(project["dependencies"]),
        "all": names_of(itertools.chain(project["dependencies"], *extras.values())),
    }
    distributions = importlib.metadata.packages_distributions()
    for module, path in MODULES.items():
        core = part_of(module) in CORE and module not in NEEDS_EXTRA
        known = required["core" if core else "all"]
        for top in {name.split(".")[0] for name in imported(path)}:
            if top not in sys.stdlib_module_names | {"swjax", "kernels"} | BENCHMARKED:
                owners = {name.lower().replace("_", "-") for name in distributions.get(top, [top])}
                assert owners & known, (
                    f"{module} imports {top}, which pyproject.toml does not require"
                )


def names_of(requirements: Iterable[str]) -> set[str]:
    return {re.split(r"[>=\[ ;]", name)[0].lower().replace("_", "-") for name in requirements}


def test_configs_import_neither_jax_nor_swjax():
    for path in (ROOT / "configs").glob("*.py"):
        tops = {name.split(".")[0] for name in imported(path)}
        assert tops <= {"configs", "ml_collections"}, path


def loaded_by(statement: str) -> set[str]:
    """Top-level modules that a fresh interpreter has loaded after a statement."""
    code = f"{statement}\nimport sys\nprint(*{{name.split('.')[0] for name in sys.modules}})"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return set(done.stdout.split())


SLOW = {
    "tensorflow_datasets",
    "grain",
    "orbax",
    "matplotlib",
    "PIL",
    "triton",
    "jax_triton",
    "ml_collections",
}


@pytest.mark.parametrize(
    ("statement", "absent"),
    [
        ("from swjax.optax import stable_adamw", SLOW | {"flax"}),
        ("import swjax.optax.stable_adamw", SLOW | {"flax"}),
        ("import swjax", SLOW | {"flax", "optax"}),
        ("import swjax.data, swjax.report, swjax.evaluators", SLOW),
        (
            "import swjax.models.clip, swjax.linen, swjax.losses",
            SLOW - {"orbax"},
        ),  # flax loads orbax
        ("import train", SLOW | {"jax"}),
    ],
)
def test_what_a_module_loads(statement, absent):
    assert not loaded_by(statement) & absent
