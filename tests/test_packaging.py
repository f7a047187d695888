"""The contents of the wheel and the sdist, and that the installed wheel works outside a checkout."""

import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

from swjax.kernels import dispatch

ROOT = Path(__file__).parent.parent
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
DATA = (
    "swjax/data/bpe_simple_vocab_16e6.txt.gz",
    "swjax/data/LICENSE-bpe_simple_vocab.txt",
    "swjax/data/imagenet_class_names.txt",
    "swjax/data/imagenet_templates.txt",
    "swjax/data/emoji/table.tsv",
    "swjax/report/page.html",
    "swjax/report/page.css",
)


def run(*command, cwd):
    done = subprocess.run(
        [sys.executable, *map(str, command)], cwd=cwd, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def dists(tmp_path_factory):
    """The sdist of the checkout, and the wheel built from it, as in a release."""
    checkout, out = tmp_path_factory.mktemp("checkout"), tmp_path_factory.mktemp("dist")
    files = ["swjax", "kernels", "configs", "examples", "requirements", "tests"]
    files += [path.name for path in ROOT.iterdir() if path.is_file() and path.name != ".git"]
    for name in files:
        if (ROOT / name).is_dir():
            ignore = shutil.ignore_patterns("__pycache__")
            shutil.copytree(ROOT / name, checkout / name, symlinks=True, ignore=ignore)
        else:
            shutil.copy(ROOT / name, checkout / name)
    # Without isolation the build uses the installed setuptools; otherwise it downloads one.
    run("-m", "build", "--no-isolation", "--outdir", out, checkout, cwd=out)
    return out


@pytest.fixture(scope="module")
def wheel(dists):
    (path,) = dists.glob("*.whl")
    return path


def sources():
    """Returns the paths in the wheel of all modules; kernels/ and configs/ are installed in swjax/."""
    modules = {path.relative_to(ROOT) for path in (ROOT / "swjax").rglob("*.py")}
    others = [*(ROOT / "kernels").rglob("*.py"), *(ROOT / "configs").rglob("*.py")]
    return {path.as_posix() for path in modules | {"swjax" / x.relative_to(ROOT) for x in others}}


def test_every_folder_of_modules_is_listed():
    """The wheel has the packages that pyproject.toml lists; a search would miss some."""
    folders = {Path(module).parent.as_posix().replace("/", ".") for module in sources()}
    assert folders == set(PYPROJECT["tool"]["setuptools"]["packages"])


@pytest.mark.release
def test_wheel_holds_every_package_and_data_file(wheel):
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    modules = {name for name in names if name.endswith(".py")}
    assert modules == sources()
    assert "swjax/kernels/products/reference.py" in modules
    assert set(DATA) <= names


@pytest.mark.release
def test_wheel_installs_one_top_level_name(wheel):
    """`kernels` at the top level would clash with a package of that name."""
    names = zipfile.ZipFile(wheel).namelist()
    info = next(name.split("/")[0] for name in names if ".dist-info/" in name)
    assert {name.split("/")[0] for name in names} == {"swjax", info}
    metadata = zipfile.ZipFile(wheel).read(f"{info}/METADATA").decode()
    assert f"Version: {version()}\n" in metadata
    licences = {name.partition("/licenses/")[2] for name in names if "/licenses/" in name}
    assert licences == {"LICENSE", "THIRD_PARTY.md", "swjax/data/LICENSE-bpe_simple_vocab.txt"}


def test_kernels_need_the_triton_that_the_extra_installs():
    (needed,) = (
        requirement.partition(";")[0]
        for requirement in PYPROJECT["project"]["optional-dependencies"]["gpu"]
        if requirement.startswith("triton")
    )
    assert needed == f"triton>={'.'.join(map(str, dispatch.OLDEST_TRITON))}"


@pytest.mark.release
def test_sdist_is_a_checkout(dists):
    (path,) = dists.glob("*.tar.gz")
    with tarfile.open(path) as tar:
        names = {name.partition("/")[2] for name in tar.getnames()}
    expected = {"train.py", "Makefile", "requirements/constraints.txt", "configs/common.py"}
    assert expected | {"kernels/products/reference.py", "tests/conftest.py", *DATA} <= names
    assert not {name for name in names if name.startswith(("runs", "data/", ".venv", "shared"))}


@pytest.mark.release
def test_installed_wheel_works_outside_the_checkout(wheel, tmp_path):
    """Layers, optimizer and data files work with only the core's dependencies; a run's defaults are there."""
    run(
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-deps",
        "--no-index",
        "--target",
        tmp_path,
        wheel,
        cwd=tmp_path,
    )
    code = f"""if True:
        import sys
        sys.path.insert(0, {str(tmp_path)!r})
        import swjax, swjax.nnx, swjax.linen, swjax.kernels
        from swjax.optax import stable_adamw
        from swjax.models import clip
        from swjax import losses
        from swjax.data import tokenize
        assert swjax.__file__.startswith({str(tmp_path)!r}), swjax.__file__
        assert swjax.kernels.__file__.startswith({str(tmp_path)!r}), swjax.kernels.__file__
        print(swjax.__version__, tokenize(["a cat"], context_length=8).tolist())
        try:
            import kernels
        except ImportError:
            print("no top-level kernels")
        from swjax.training import config
        assert str(config.COMMON).startswith({str(tmp_path)!r})
        assert config.load(str(config.COMMON)).model.name == "tiny"
    """
    out = run("-I", "-c", code, cwd=tmp_path)
    assert out == f"{version()} [[49406, 320, 2368, 49407, 0, 0, 0, 0]]\nno top-level kernels\n"


def test_kernels_of_a_checkout_are_imported_by_one_name_only():
    code = "import kernels"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert "must be imported as 'swjax.kernels'" in done.stderr
    assert (ROOT / "swjax" / "kernels").is_symlink()


def test_constraints_cover_the_requirements_and_name_no_address():
    lines = (ROOT / "requirements" / "constraints.txt").read_text().splitlines()
    lines = [line for line in lines if line and not line.startswith("#")]
    pin = re.compile(r'([a-z0-9-]+)==[\d.]+(?:\.post\d+)?( ; python_version (<|>=) "3\.12")?')
    pinned = {pin.fullmatch(line)[1] for line in lines}
    project = PYPROJECT["project"]
    needed = project["dependencies"] + project["optional-dependencies"]["train"]
    needed += project["optional-dependencies"]["dev"] + project["optional-dependencies"]["test"]
    names = {re.split(r"[>=\[ ;]", name)[0].lower().replace("_", "-") for name in needed}
    assert names - pinned == {"swjax", "setuptools"}


def test_one_version_everywhere():
    """The release workflow also compares the tag with these files."""
    citation, changelog = ((ROOT / name).read_text() for name in ("CITATION.cff", "CHANGELOG.md"))
    assert f"version: {version()}\n" in citation
    date = re.search(rf"^## \[{version()}\] - (unreleased|20\d\d-\d\d-\d\d)$", changelog, re.M)
    released = re.search(r'^date-released: "(.*)"$', citation, re.M)
    assert date[1] == (released[1] if released else "unreleased")


def test_extras_of_the_image_exist():
    extras = re.search(r"\[train,cuda\$\{CUDA\}\]", (ROOT / "Dockerfile").read_text())
    assert extras and {"train", "cuda12", "cuda13"} <= set(
        PYPROJECT["project"]["optional-dependencies"]
    )


def test_no_upper_caps():
    project = PYPROJECT["project"]
    extras = [r for group in project["optional-dependencies"].values() for r in group]
    for requirement in [project["requires-python"], *project["dependencies"], *extras]:
        assert not re.search("<|==|~=", requirement.split(";")[0]), requirement


def version():
    return re.search(r'__version__ = "(.*)"', (ROOT / "swjax" / "__init__.py").read_text())[1]
