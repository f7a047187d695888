"""swjax.safe_files: what is written through links, read outside a folder, and masked."""

import os

import pytest

from swjax import safe_files
from swjax.safe_files import inside, mask_credentials, open_inside, open_no_follow, replacing


@pytest.fixture
def victim(tmp_path):
    """A file that links point to; it must never change."""
    path = tmp_path / "victim"
    path.write_text("secret")
    yield path
    assert path.read_text() == "secret"


@pytest.fixture
def folder(tmp_path):
    path = tmp_path / "run"
    path.mkdir()
    return path


def test_a_file_is_replaced_as_a_whole(folder):
    path = safe_files.write_atomically(folder / "page.html", "old")
    with pytest.raises(TypeError):
        _replace_with(path, [b"ne", None])
    assert path.read_text() == "old"
    safe_files.write_atomically(path, "caf\udce9.jpg")  # a name in Latin-1
    assert path.read_text() == r"caf\udce9.jpg"
    safe_files.write_atomically(path, b"\xff")
    assert path.read_bytes() == b"\xff" and os.listdir(folder) == ["page.html"]
    assert path.stat().st_mode & 0o777 == 0o666 & ~_umask()


def _replace_with(path, parts):
    with replacing(path) as file:
        for part in parts:
            file.write(part)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


@pytest.mark.parametrize(
    "name", ["index.html", f"index.html.{os.getpid()}.part"], ids=["name", "part"]
)
def test_writing_replaces_a_link(folder, victim, name):
    (folder / name).symlink_to(victim)
    safe_files.write_atomically(folder / "index.html", "page")
    assert (folder / "index.html").read_text() == "page"
    assert not (folder / "index.html").is_symlink() and os.listdir(folder) == ["index.html"]


def test_a_file_changed_in_place_must_not_be_a_link(folder, victim):
    (folder / ".lock").symlink_to(victim)
    for mode in ("a", "w", "r+b"):
        with pytest.raises(OSError, match="not followed when writing: remove it"):
            open_no_follow(folder / ".lock", mode)
    with open_no_follow(folder / "log", "a", encoding="utf-8") as file:
        file.write("line")
    assert (folder / "log").read_text() == "line"


BAD_NAMES = ["../victim", "/etc/hostname", "", ".", "a/../../victim", "a\0b", "\ud800", "..",
             "//etc/hostname"]  # fmt: skip


@pytest.mark.parametrize("name", BAD_NAMES)
def test_names_that_leave_the_folder_are_refused(folder, victim, name):
    for use in (inside, open_inside, safe_files.make_folder):
        with pytest.raises(ValueError, match="not the name of a file inside") as error:
            use(folder, name)
        assert "\n" not in str(error.value)


def test_links_out_of_the_folder_are_refused(folder, victim, tmp_path):
    (folder / "file").symlink_to(victim)
    (folder / "report").symlink_to(tmp_path)
    (folder / "loop").symlink_to("loop")
    for name in ("file", "report/victim"):
        with pytest.raises(ValueError, match="is a link out of"):
            open_inside(folder, name)
    with pytest.raises(ValueError, match="is a link out of"):
        safe_files.make_folder(folder, "report")
    with pytest.raises(OSError, match="symbolic links"):
        open_inside(folder, "loop")


def test_links_within_the_folder_and_a_linked_folder_are_read(folder, tmp_path):
    (folder / "file").write_text("own")
    (folder / "alias").symlink_to("file")
    (tmp_path / "run2").symlink_to(folder)
    assert safe_files.read_inside(tmp_path / "run2", "alias") == b"own"
    assert safe_files.make_folder(tmp_path / "run2", "a/b").is_dir()


def test_pipes_folders_and_large_files_are_refused(folder):
    os.mkfifo(folder / "pipe")
    (folder / "sub").mkdir()
    for name in ("pipe", "sub"):
        with pytest.raises(OSError, match=f"Not a regular file: .*{name}"):
            open_inside(folder, name)
    (folder / "large").write_bytes(bytes(11))
    with pytest.raises(ValueError, match="larger than 10 bytes"):
        safe_files.read_inside(folder, "large", 10)


@pytest.mark.parametrize("text", ["[" * 100_000, "{", "1" * 5000, "", b"\xff\xfe\xff"])
def test_malformed_json_is_one_line(text):
    with pytest.raises(ValueError, match="JSON") as error:
        safe_files.parse_json(text)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("address", "shown"),
    [
        ("ftp://bob:PASSWORD@host/x", "ftp://***@host/x"),
        ("ftp://bob:p@ss@host:21/x", "ftp://***@host:21/x"),
        ("ftp://bob:pa/ss@host/x", "ftp://***@host/x"),
        ("ftp://:PASSWORD@host/x", "ftp://***@host/x"),
        ("https://TOKEN@host/x", "https://***@host/x"),
        ("simplecache::ftp://a:b@h/x,ftp://c:d@g/y", "simplecache::ftp://***@h/x,ftp://***@g/y"),
        ("https://h/x?X-Amz-Signature=1&Expires=2", "https://h/x?X-Amz-Signature=***&Expires=2"),
        ("az://c/x?sv=1&SIG=abc%3D", "az://c/x?sv=1&SIG=***"),
        ('{"dir": "ftp://a:b@h", "b": "x@y"}', '{"dir": "ftp://***@h", "b": "x@y"}'),
    ],
)
def test_credentials_are_masked(address, shown):
    assert mask_credentials(address) == shown
    assert mask_credentials(shown) == shown


@pytest.mark.parametrize(
    "address",
    ["s3://bucket/user@domain/x", "abfss://container@account/x", "http://host:8080/a@b", "a@b:c"],
)
def test_addresses_without_credentials_are_unchanged(address):
    assert mask_credentials(address) == address
