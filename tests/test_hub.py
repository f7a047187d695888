"""Weights by name: from a cache laid out as huggingface_hub does, from an endpoint, and neither."""

import hashlib
import http.server
import json
import shutil
import socket
import threading
import time

import pytest
from clip_oracle import random_model, small_config, write_weights
from flax import nnx
from micro_run import ROOT
from safetensors.numpy import load_file, save_file

from swjax import inference, interop
from swjax.interop import hub
from swjax.tools import plan
from swjax.training import config as config_lib
from swjax.training.config import ConfigError

COMMIT = "0123456789abcdef0123456789abcdef01234567"
OPEN_CLIP = "laion/CLIP-ViT-B-32-laion2B-s34B-b79K"


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """An empty cache, and no network."""
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.chdir(tmp_path)
    return tmp_path / "hub"


def store(cache, repository, folder, revision="main"):
    """Puts the files of a folder into the cache: links to blobs named by their content."""
    home = cache / f"models--{repository.replace('/', '--')}"
    for name in ("blobs", "refs", f"snapshots/{COMMIT}"):
        (home / name).mkdir(parents=True, exist_ok=True)
    (home / "refs" / revision).write_text(COMMIT)
    for file in folder.iterdir():
        content = hashlib.sha256(file.read_bytes()).hexdigest()
        shutil.copy(file, home / "blobs" / content)
        (home / "snapshots" / COMMIT / file.name).symlink_to(f"../../blobs/{content}")
    return home / "snapshots" / COMMIT


@pytest.mark.parametrize(
    "name, repository, layout, revision",
    [
        ("ViT-B-32/laion2b_s34b_b79k", OPEN_CLIP, "open_clip", "main"),
        ("hf-hub:laion/own-CLIP@v2.0", "laion/own-CLIP", "open_clip", "v2.0"),
        ("google/siglip-base", "google/siglip-base", "huggingface", "main"),
    ],
)
def test_a_model_in_the_cache_is_found_by_its_names(
    cache, tmp_path, name, repository, layout, revision
):
    model = nnx.merge(*random_model(small_config()))
    interop.save(tmp_path / "made", model, layout)
    store(cache, repository, tmp_path / "made", revision)
    assert interop.load(name).cfg.vision == model.cfg.vision
    assert hub.resolve(f"{repository}@{COMMIT}") == hub.resolve(name)
    assert inference.load(name).cfg == interop.configuration(name)


def test_a_run_and_its_plan_start_from_a_name(cache, tmp_path, capsys):
    write_weights(tmp_path / "made")
    snapshot = store(cache, OPEN_CLIP, tmp_path / "made")
    settings = [("checkpoint.init_from", "ViT-B-32/laion2b_s34b_b79k"), ("data.name", "synthetic")]
    config = config_lib.load(f"{ROOT}/configs/finetune.py", settings)
    assert plan.show(config, "h200:1") == 0
    assert "the model of ViT-B-32/laion2b_s34b_b79k, " in capsys.readouterr().out
    (snapshot / "open_clip_model.safetensors").unlink()  # half-downloaded
    with pytest.raises(ConfigError) as error:
        plan.show(config, "h200:1")
    told = str(error.value)
    files = "open_clip_config.json open_clip_model.safetensors tokenizer.json"
    command = f"run `hf download {OPEN_CLIP} {files} --local-dir weights/{OPEN_CLIP[6:]}`"
    assert told.startswith(
        "config.checkpoint.init_from='ViT-B-32/laion2b_s34b_b79k': there is no such path"
    )
    assert command in told and "does not hold all files" in told and "\n" not in told


def test_what_is_a_path_is_no_name(tmp_path):
    (tmp_path / "weights").mkdir()
    for path in (
        "weights/ViT-B-32",
        "./a/b",
        "a/b.safetensors",
        "a/b/c",
        "/a/b",
        "gs://a/b",
        "a",
        "a/../b",
    ):
        assert hub.named(path) is None, path
    with pytest.raises(FileNotFoundError, match="weights/ViT-B-32 does not exist"):
        interop.load("weights/ViT-B-32")
    with pytest.raises(ValueError, match="hf download .* config.json .* --revision v1 --local"):
        interop.load("google/own@v1")


class Endpoint(http.server.BaseHTTPRequestHandler):
    """Serves a folder at /OWNER/NAME/resolve/REVISION/FILE as the hub does."""

    folder = None
    repository = "own/model"

    def do_HEAD(self):
        self.answer()

    def do_GET(self):
        self.wfile.write(self.answer())

    def answer(self) -> bytes:
        prefix, _, name = self.path.partition("/resolve/main/")
        file = self.folder / name
        if prefix != f"/{self.repository}":
            error = "RepoNotFound"
        else:
            error = "" if name and file.is_file() else "EntryNotFound"
        content = b"" if error else file.read_bytes()
        self.send_response(404 if error else 200)
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("ETag", f'"{hashlib.sha256(content).hexdigest()}"')
        self.send_header("Content-Length", str(len(content)))
        if error:
            self.send_header("X-Error-Code", error)
        self.end_headers()
        return content

    def log_message(self, *_):
        """Prints nothing."""


@pytest.fixture
def endpoint(tmp_path, monkeypatch):
    """A hub with the model own/model, whose files are in the folder of the result."""
    constants = pytest.importorskip("huggingface_hub").constants
    folder = tmp_path / "served"
    folder.mkdir()
    handler = type("Served", (Endpoint,), {"folder": folder})
    with http.server.ThreadingHTTPServer(("localhost", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.delenv("HF_HUB_OFFLINE")
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)  # read when it was imported
        monkeypatch.setenv("HF_ENDPOINT", f"http://localhost:{server.server_port}")
        yield folder
        server.shutdown()


def split(folder) -> None:
    """Splits model.safetensors into two files with an index, as transformers does."""
    held = sorted(load_file(folder / "model.safetensors").items())
    (folder / "model.safetensors").unlink()
    index = {}
    for number, part in enumerate((held[:9], held[9:]), 1):
        save_file(dict(part), folder / f"model-{number}.safetensors")
        index |= {name: f"model-{number}.safetensors" for name, _ in part}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))


def test_a_model_in_shards_is_downloaded_once(endpoint, cache, monkeypatch):
    model = nnx.merge(*random_model(small_config()))
    interop.save(endpoint, model, "huggingface")
    split(endpoint)
    (endpoint / "tokenizer.json").write_text("{}")
    loaded = interop.load("own/model")
    assert loaded.cfg.text == model.cfg.text
    snapshot = cache / "models--own--model" / "snapshots" / COMMIT
    assert {file.name for file in snapshot.iterdir()} == {file.name for file in endpoint.iterdir()}
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert interop.load("own/model").cfg == loaded.cfg
    (snapshot / "model-2.safetensors").unlink()
    with pytest.raises(ValueError, match="does not hold all files of own/model"):
        interop.load("own/model")


def test_models_that_the_hub_does_not_have_are_one_line(endpoint):
    (endpoint / "config.json").write_text(json.dumps({"model_type": "clip"}))
    for name, message in (
        ("own/other", "no such path, and the hub shows no model own/other of revision main: check"),
        ("own/model", "the model own/model of the hub has no complete weights of open_clip or"),
    ):
        with pytest.raises(ValueError, match=message) as error:
            interop.load(name)
        assert "\n" not in str(error.value)


def test_without_the_package_the_line_names_both_ways(monkeypatch):
    monkeypatch.setattr("swjax.packages.importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"`hf download .*; .* install \"swjax\[hub\]\"") as error:
        interop.configuration("own/model")
    assert "\n" not in str(error.value)


def test_without_a_network_there_is_one_line_at_once(monkeypatch, caplog):
    pytest.importorskip("huggingface_hub")
    with socket.create_server(("localhost", 0)) as server:
        port = server.getsockname()[1]
    monkeypatch.setenv("HF_ENDPOINT", f"http://localhost:{port}")  # which nobody serves now
    monkeypatch.setattr(time, "sleep", lambda seconds: pytest.fail("waits and tries again"))
    with pytest.raises(ValueError, match="run `hf download google/absent config.json"):
        hub.resolve("google/absent")
    assert not caplog.records
