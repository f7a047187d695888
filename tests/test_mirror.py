"""A run that is copied to an fsspec address while it trains, and resumed from there."""

import json
import shutil
import zipfile

import fsspec
import pytest
from micro_run import assert_same_bits, final_state, records

from swjax.training import loop
from swjax.training.faults.errors import ConfigError, RunError
from swjax.training.state.mirror import INDEX, Mirror


@pytest.fixture(params=["memory", "file"])
def address(request, tmp_path):
    """An empty folder at an address."""
    yield (
        f"memory://bucket/{tmp_path.name}"
        if request.param == "memory"
        else (f"file://{tmp_path}/there")
    )
    fsspec.filesystem("memory").store.clear()


# For what does not depend on the file system.
ONE_ADDRESS = pytest.mark.parametrize("address", ["file"], indirect=True)


@pytest.fixture
def run(micro, monkeypatch, tmp_path):
    """A function that trains in a folder: (folder's name, config changes, steps before it stops)."""
    stop = loop.distributed.should_stop

    def begin(name, after=10**9, **changes):
        monkeypatch.setattr(
            loop.distributed, "should_stop", lambda step, asked: step >= after or stop(step, asked)
        )
        code = loop.train_and_evaluate(micro(**changes), tmp_path / name)
        return tmp_path / name, code

    return begin


def held(address):
    """Returns {name: bytes} of the files at an address."""
    fs, root = fsspec.core.url_to_fs(address)
    return {path.removeprefix(root).lstrip("/"): fs.cat_file(path) for path in fs.find(root)}


@pytest.mark.release
def test_another_machine_goes_on_bit_for_bit(run, address, reference, micro, capsys):
    first, code = run("first", after=3, checkpoint__mirror=address)
    assert code == 0
    there = held(address)
    assert json.loads(there[INDEX]) == {"checkpoints": [2, 3]}
    assert there["metrics.jsonl"] == (first / "metrics.jsonl").read_bytes()
    assert ".lock" not in there
    shutil.rmtree(first)

    second, code = run("second", checkpoint__mirror=address)
    assert code == 0
    assert (
        f"copied the run from {address}, with the checkpoint of step 3" in capsys.readouterr().out
    )
    assert records(second) == records(reference[1])
    for mine, theirs in zip(final_state(micro(), second), final_state(*reference), strict=True):
        assert_same_bits(mine, theirs)
    there = held(address)
    assert json.loads(there[INDEX]) == {"checkpoints": [4, 6]}
    assert {name.split("/")[1] for name in there if name.startswith("checkpoints/")} == {"4", "6"}
    here = {
        path.relative_to(second).as_posix(): path.read_bytes()
        for path in second.rglob("*")
        if path.is_file() and path.name != ".lock"
    }
    assert here == {name: data for name, data in there.items() if name != INDEX}


@pytest.mark.release
@ONE_ADDRESS
def test_a_finished_run_is_finished_elsewhere(run, address, reference, capsys):
    Mirror(address, reference[1]).push()
    workdir, code = run("elsewhere", checkpoint__mirror=address)
    assert code == 0 and (workdir / "results.json").exists()
    assert "compiling" not in capsys.readouterr().out


@ONE_ADDRESS
def test_a_workdir_with_a_newer_checkpoint_is_kept(address, reference, tmp_path):
    first = shutil.copytree(reference[1], tmp_path / "first")  # has checkpoints of steps 4 and 6
    shutil.move(first / "checkpoints" / "6", tmp_path)
    Mirror(address, first).push()
    shutil.move(tmp_path / "6", first / "checkpoints")
    (first / "metrics.jsonl").unlink()
    Mirror(address, first).fetch()
    assert not (first / "metrics.jsonl").exists()


@ONE_ADDRESS
@pytest.mark.release
def test_a_damaged_checkpoint_is_replaced_by_its_copy(run, address, capsys):
    """The run went on from an older one, or not at all, and its next copy removed the good one."""
    workdir, _ = run("first", after=3, checkpoint__mirror=address)
    for folder in (workdir / "checkpoints").iterdir():
        (folder / "manifest" / "metadata").write_text("{}")
    _, code = run("first", after=5, checkpoint__mirror=address)
    assert code == 0 and records(workdir)[-1]["step"] == 5
    assert [path.name[:2] for path in (workdir / "damaged").iterdir()] == ["3-"]
    assert "with the checkpoint of step 3" in capsys.readouterr().out


@ONE_ADDRESS
def test_a_copy_cut_short_is_not_used(address, reference, tmp_path):
    Mirror(address, reference[1]).push()
    fs, root = fsspec.core.url_to_fs(address)
    fs.makedirs(f"{root}/checkpoints/9/manifest")
    fs.pipe_file(f"{root}/checkpoints/9/manifest/metadata", b"half")
    (tmp_path / "second").mkdir()
    Mirror(address, tmp_path / "second").fetch()
    assert [path.name for path in (tmp_path / "second" / "checkpoints").iterdir()] == ["6"]


@ONE_ADDRESS
@pytest.mark.release
def test_a_failed_copy_is_told_and_tried_again(run, address, monkeypatch, capsys):
    fs, _ = fsspec.core.url_to_fs(address)
    put, failures = type(fs).put_file, [1]

    def flaky(self, *args, **kwargs):
        if failures:
            raise PermissionError(f"no access {failures.pop()}")
        return put(self, *args, **kwargs)

    monkeypatch.setattr(type(fs), "put_file", flaky)
    update, copied = Mirror.update, []

    def waiting(self, say):
        update(self, say)
        if self._copy:
            copied.append(self._copy.exception())  # waits until the copy has ended

    monkeypatch.setattr(Mirror, "update", waiting)
    # A checkpoint is saved while later steps run, so the first one to be copied may be that of step 4.
    _, code = run("first", checkpoint__mirror=address, train__steps=12)
    assert code == 0 and any(copied)
    assert "PermissionError: no access 1" in capsys.readouterr().out
    assert json.loads(held(address)[INDEX]) == {"checkpoints": [10, 12]}


@pytest.mark.parametrize("name", ["../../evil", "checkpoints/9/../../../evil", "out/evil"])
def test_a_mirror_writes_nothing_outside_the_workdir(name, tmp_path):
    """A zip with ../../x wrote two levels above the workdir."""
    with zipfile.ZipFile(tmp_path / "run.zip", "w") as archive:
        for member in ("metrics.jsonl", name, "checkpoints/9/state/d"):
            archive.writestr(member, "bytes")
        archive.writestr(INDEX, '{"checkpoints": [9]}')
    workdir = tmp_path / "runs" / "deep" / "first"
    workdir.mkdir(parents=True)
    (workdir / "out").symlink_to(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(RunError, match="cannot be used: ValueError: .*evil") as error:
        Mirror(f"zip://::{tmp_path}/run.zip", workdir).fetch()
    assert "\n" not in str(error.value)
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("index", [b"[1]", b'{"checkpoints": ["../x"]}', b"[" * 10**5, b"\xff"])
def test_a_damaged_index_is_one_line(index, tmp_path):
    (tmp_path / INDEX).write_bytes(index)
    with pytest.raises(RunError, match="cannot be used: ") as error:
        Mirror(str(tmp_path), tmp_path / "run").fetch()
    assert "\n" not in str(error.value)


def test_links_out_of_the_workdir_are_not_copied(tmp_path, capsys):
    (tmp_path / "secret").write_text("private")
    workdir = tmp_path / "run"
    (workdir / "checkpoints" / "1").mkdir(parents=True)
    (workdir / "metrics.jsonl").write_text("{}\n")
    for name in ("notes", "checkpoints/1/state"):
        (workdir / name).symlink_to(tmp_path / "secret")
    (workdir / "mirror.part").mkdir()
    (workdir / "mirror.part" / "of a fetch").touch()  # that ended early
    mirror = Mirror(f"file://{tmp_path}/there", workdir)
    for _ in range(2):  # says it once
        mirror.push()
    assert set(held(f"file://{tmp_path}/there")) == {INDEX, "metrics.jsonl"}
    told = (
        "2 links lead out of the workdir and are not copied to the mirror, such as 'checkpoints/1/"
    )
    assert capsys.readouterr().out.count(told) == 1


def test_credentials_of_an_address_are_not_shown(tmp_path, monkeypatch):
    """An unreachable mirror ended in a traceback and the code of a diverged run."""
    address = "ftp://bob:PASSWORD@localhost:1/run"
    with pytest.raises(
        RunError, match="mirror='ftp://.*localhost:1/run' cannot be used: "
    ) as error:
        Mirror(address, tmp_path)
    assert error.value.exit_code == 3
    assert "PASSWORD" not in str(error.value) and "\n" not in str(error.value)


def test_an_address_that_cannot_be_used_is_one_line(run, tmp_path):
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(RunError, match="mirror='file://.*/file' cannot be used: ") as error:
        run("first", checkpoint__mirror=f"file://{tmp_path}/file")
    assert "\n" not in str(error.value)
    for wrong in ("nosuch://bucket/run", "abfs://bucket/run"):  # abfs needs a package
        with pytest.raises(ConfigError, match=r"config.checkpoint.mirror: ") as error:
            run("second", checkpoint__mirror=wrong)
        assert "\n" not in str(error.value) and not (tmp_path / "second").exists()
    for inside in (f"{tmp_path}/third", f"file://{tmp_path}/third/mirror"):
        with pytest.raises(ConfigError, match="mirror='.*/third.*' is in the workdir, which it"):
            run("third", checkpoint__mirror=inside)
