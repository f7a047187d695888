"""Files and folders import each other in one direction only, and slow packages only when needed."""

import ast
import functools
import graphlib
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

# {folder of swjax: the folders that it may import}. "swjax" stands for the modules directly in swjax/, all
# of which belong to the library.
LIBRARY = {
    "kernels": set(),
    "optax": {"kernels"},
    "linear": {"kernels", "swjax"},
    "swjax": {"kernels", "linear"},
    "serving": {"kernels", "linear", "swjax"},
    "diagnostics": {"kernels", "linear", "optax", "swjax"},
}
APPLICATION = {
    "models": {*LIBRARY},
    "losses": {"kernels", "linear", "swjax"},
    "data": set(),
    "interop": {"data", "models", "serving"},
    "evaluators": {"data", "models"},
    "report": {"data", "diagnostics"},
    "training": {*LIBRARY, "data", "evaluators", "interop", "losses", "models", "report"},
    "inference": {*LIBRARY, "data", "evaluators", "interop", "models", "training"},
    "evaluate": {*LIBRARY, "data", "evaluators", "inference", "models", "report", "training"},
    "tools": {*LIBRARY, "data", "evaluators", "models", "report", "training"},
}
ALLOWED = LIBRARY | APPLICATION
# They need the standard library only, so every folder may import them.
LEAVES = {"swjax.fitting", "swjax.kept", "swjax.packages", "swjax.safe_files"}
# A command line imports what it starts.
COMMANDS = {"swjax.__main__", "swjax.diagnostics.__main__", "swjax.training.command"}


def folder_of(module: str) -> str:
    """Returns the folder of a module: "optax" for `swjax.optax.rms`, "swjax" for `swjax.recipes`."""
    names = module.split(".")
    return names[1] if len(names) > 1 and names[1] in ALLOWED else "swjax"


def modules():
    """Returns (name, path) of every module of the package."""
    for path in sorted(
        path for name in ("swjax", "kernels") for path in (ROOT / name).rglob("*.py")
    ):
        names = path.relative_to(ROOT).with_suffix("").parts
        names = names[:-1] if names[-1] == "__init__" else names
        if names[:2] == ("swjax", "kernels"):
            continue  # through the symlink
        yield ".".join(("swjax", *names) if names[0] == "kernels" else names), path


@functools.cache
def imported(path: Path) -> list[str]:
    """Returns the names of the modules that a file imports, inside functions too.

    `from swjax import x` is `swjax.x`, and `from swjax.a import b` is `swjax.a.b` if that is a module.
    """
    return list(_imported(path))


def _imported(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                yield name if node.module == "swjax" or name in MODULES else node.module


MODULES = dict(modules())


def forbidden(module: str, names: Iterable[str]) -> list[str]:
    """Returns those of the imported names that this module must not import."""
    folder = folder_of(module)
    inside = (name for name in names if name.split(".")[0] == "swjax")
    allowed = {folder, *ALLOWED[folder]}
    return [name for name in inside if folder_of(name) not in allowed and name not in LEAVES]


def test_leaves_import_the_standard_library_only():
    for leaf in LEAVES:
        assert {name.split(".")[0] for name in imported(MODULES[leaf])} <= sys.stdlib_module_names


def test_every_folder_has_its_rule():
    folders = {path.parent.name for path in (ROOT / "swjax").glob("*/__init__.py")}
    assert folders == set(ALLOWED) - {"swjax"}


def test_imports_run_one_way():
    names = set(MODULES) - COMMANDS
    found = {name: forbidden(name, imported(MODULES[name])) for name in names}
    assert not {name: modules for name, modules in found.items() if modules}


def test_no_file_imports_itself_through_others():
    graph = {name: set(imported(path)) & set(MODULES) - {name} for name, path in MODULES.items()}
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        pytest.fail(" imports ".join(reversed(error.args[1])))


def test_no_two_folders_import_each_other():
    """Except the flat modules and `linear`: `linear` reads `recipes.py`, and `nnx.py` uses `linear`."""
    for one, others in ALLOWED.items():
        for other in others - {one}:
            assert one not in ALLOWED[other] or {one, other} == {"swjax", "linear"}


def test_the_library_may_not_import_the_application():
    """`forbidden` finds imports in each forbidden direction."""
    for folder, application in itertools.product(LIBRARY, APPLICATION):
        assert forbidden(f"swjax.{folder}.module", [f"swjax.{application}.module"])


# Imported only with an NVIDIA GPU.
NEEDS_EXTRA = re.compile(r"swjax\.kernels\.(.*\.)?triton")


def test_what_is_imported_is_required():
    """pyproject.toml lists every imported package: those of the core in `dependencies`, others in extras."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    required = {
        "core": names_of(project["dependencies"]),
        "all": names_of(itertools.chain(project["dependencies"], *extras.values())),
    }
    distributions = importlib.metadata.packages_distributions()
    for module, path in MODULES.items():
        core = folder_of(module) in {*LIBRARY, "models", "losses"} - {
            "serving"
        } and not NEEDS_EXTRA.match(module)
        known = required["core" if core else "all"]
        for top in {name.split(".")[0] for name in imported(path)}:
            if top not in sys.stdlib_module_names | {"swjax"}:
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


SLOW = {
    "tensorflow",
    "tensorflow_datasets",
    "torch",
    "grain",
    "orbax",
    "matplotlib",
    "PIL",
    "triton",
    "jax_triton",
    "ml_collections",
}
# {statement: modules that are not loaded after it}; one process executes them in this order.
ABSENT = {
    "import train": SLOW | {"jax"},
    "import swjax": SLOW | {"flax", "optax"},
    "import swjax.optax": SLOW | {"flax"},
    "import swjax.data, swjax.report, swjax.evaluators": SLOW
    | {"array_record", "ftfy", "regex", "resvg_py"},
    "import swjax.models.clip, swjax.linen, swjax.losses": SLOW - {"orbax"},  # flax imports orbax
}
# `jax.distributed` must be initialized before anything asks JAX for its devices.
LAST = (
    "import swjax.training.loop; from jax._src import xla_bridge; print(list(xla_bridge._backends))"
)


@pytest.fixture(scope="module")
def printed() -> list[str]:
    """The top-level modules that a new interpreter has loaded after each statement, and JAX's devices."""
    modules = "print(*{name.split('.')[0] for name in sys.modules})"
    code = "import sys\n" + "".join(f"{statement}\n{modules}\n" for statement in ABSENT) + LAST
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


@pytest.mark.parametrize("statement", ABSENT)
def test_what_a_module_loads(statement, printed):
    loaded = set(printed[list(ABSENT).index(statement)].split())
    assert "sys" in loaded and not loaded & ABSENT[statement]


def test_importing_asks_for_no_devices(printed):
    assert printed[-1] == "[]"
