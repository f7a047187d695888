"""Scalars of a training step: correct in half precision, and named as the log and the report expect."""

import errno
import itertools
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from processes import file_size_limit

from swjax import diagnostics
from swjax.diagnostics.values import magnitudes
from swjax.models import clip
from swjax.optax import stable_adamw
from swjax.report import charts


def test_norm_of_half_precision_does_not_overflow():
    tree = {"w": jnp.full((64,), 3e4, jnp.float16), "b": jnp.zeros((), jnp.bfloat16)}
    norm = jax.jit(lambda tree: diagnostics.norms(grad=tree))(tree)["train/grad_norm"]
    assert norm.dtype == jnp.float32
    np.testing.assert_allclose(norm, 8 * 3e4, rtol=1e-3)


def test_norm_of_nothing_is_zero():
    assert diagnostics.norms(update={})["train/update_norm"] == 0


def test_names_are_those_the_report_reads():
    """Every name in the report's stability charts is among the diagnostics of a model's train step."""
    cfg = clip.config(
        "tiny",
        vision={"image_size": 16, "patch_size": 8, "width": 16, "heads": 2, "layers": 3},
        text={"context_length": 4, "width": 16, "heads": 2, "layers": 1},
    )
    model = nnx.eval_shape(lambda: clip.CLIP(cfg, rngs=nnx.Rngs(0)))
    graph, params = nnx.split(model, nnx.Param)
    optimizer = optax.chain(optax.identity(), stable_adamw(1e-3, block_axes=clip.block_axes))

    def step(params):
        _, out = nnx.merge(graph, params).encode_image(jnp.zeros((2, 16, 16, 3)))
        _, state = optimizer.update(params, optimizer.init(params), params)
        return diagnostics.rms(state) | diagnostics.feature_magnitude({"vision": out})

    found = jax.eval_shape(step, nnx.to_pure_dict(params))
    assert found[charts.PATCH_RMS].shape == ()
    assert found["stability/rms/vision/blocks/mlp/fc1/kernel"].shape == (3,)
    assert found[charts.FEATURES].shape == (3,)


def test_what_depends_on_a_nonfinite_tensor_does_not_repeat_the_search():
    """As a skipped step, which keeps every tensor: the program is as long as the search and its uses."""

    def kept(xs):
        good = diagnostics.first_nonfinite(x=xs).index < 0
        return [jnp.where(good, x + 1, x) for x in xs]

    xs = [jnp.ones(4)] * 30
    program = jax.jit(kept).lower(xs).compile().as_text()
    assert 0 < program.count(" not(") <= 2 * len(xs)


def test_a_recorder_goes_on_and_never_goes_back(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with diagnostics.Recorder(path, fetch_every=2) as recorder:
        for step in range(1, 6):
            recorder.add(step, {"train/loss": jnp.float32(np.nan if step == 2 else step)})
        with pytest.raises(ValueError, match="^steps must not decrease, got 3 after 5: "):
            recorder.add(3, {"train/loss": jnp.float32(0)})
    with open(path, "a") as file:
        file.write('{"step": 6, "tr')  # an incomplete line, as after a kill
    with diagnostics.Recorder(path, last_step=4) as recorder:
        with pytest.raises(ValueError, match="^steps must not decrease, got 4 after 4: "):
            recorder.add(4, {"train/loss": jnp.float32(0)})
        recorder.add(5, {"train/loss": jnp.float32(50)})
        recorder.add(5, {"quantization/zeros/fc/x": jnp.ones(2)})
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["train/loss"] for line in lines] == [1, None, 3, 4, 50]
    assert lines[-1]["quantization/zeros/fc/x/1"] == 1


def test_a_recorder_does_not_erase_a_log(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"st')  # an incomplete line is no record
    with diagnostics.Recorder(path) as recorder:
        recorder.add(1, {"train/loss": 2.5})
    before = path.read_text()
    message = f"^{re.escape(str(path))} must have no records .* last_step=N .*, or remove the file$"
    with pytest.raises(ValueError, match=message):
        diagnostics.Recorder(path)
    with pytest.raises(ValueError, match="^last_step must be at least 0, got -1: "):
        diagnostics.Recorder(path, last_step=-1)
    assert path.read_text() == before


def test_a_recorder_takes_numbers_of_every_kind(tmp_path):
    path = tmp_path / "metrics.jsonl"
    metrics = {
        "a": 2.5,
        "b": 3,
        "c": np.float64(0.1),
        "d": np.int64(5e9),
        "e": [1.0, 2.0],
        "f": 1e300,
    }
    with diagnostics.Recorder(path) as recorder:
        recorder.add(np.int64(1), metrics | {"g": jnp.bfloat16(0.5), "h": np.ones(1, jnp.bfloat16)})
        recorder.add(jnp.int32(2), {})
        recorder.add(3, {})
        recorder.add(3, {"b": True})
        for bad in ("x", None, 1j, jnp.complex64(1j)):
            with pytest.raises(TypeError, match="^metric 'a' .* a number or an array of numbers, "):
                recorder.add(4, {"a": bad})
    first, *rest = (json.loads(line) for line in path.read_text().splitlines())
    assert first == {
        "step": 1, "a": 2.5, "b": 3, "c": 0.1, "d": 5e9, "e/0": 1, "e/1": 2, "f": None, "g": 0.5, "h/0": 1
    }  # fmt: skip
    assert rest == [{"step": 2}, {"step": 3, "b": 1}]
    assert '"step": 1,' in path.read_text()


def test_a_recorder_keeps_integers_that_int32_holds(tmp_path):
    """float32 rounds integers above 2^24, such as the number of examples seen."""
    path, seen = tmp_path / "metrics.jsonl", 2**24 + 1
    exact = {"device": jnp.array([seen, -1]), "host": seen, "bytes": np.uint8(255)}
    with diagnostics.Recorder(path) as recorder:
        recorder.add(1, exact | {"loss": jnp.float32(0.1), "large": 5 * 10**9})
        recorder.add(2, {"host": 2**31 - 1})
    first, second = map(json.loads, path.read_text().splitlines())
    assert first == {
        "step": 1, "device/0": seen, "device/1": -1, "host": seen, "bytes": 255, "loss": 0.1, "large": 5e9
    }  # fmt: skip
    assert second == {"step": 2, "host": 2**31 - 1}


def test_a_recorder_refuses_what_it_could_not_write(tmp_path):
    """A traced metric made every later flush fail; metrics after `close` were lost."""
    with diagnostics.Recorder(tmp_path / "metrics.jsonl") as recorder:
        with pytest.raises(TypeError, match="^metric 'a' must have a value, got a traced array"):
            jax.jit(lambda x: recorder.add(1, {"a": x}))(1.0)
        recorder.add(1, {"a": 2.0})
    with pytest.raises(ValueError, match="closed before step 2: .* with last_step=1$"):
        recorder.add(2, {"a": 2.0})
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 1, "a": 2.0}\n'


def test_a_recorder_closes_its_file_if_the_disk_is_full(tmp_path, monkeypatch):
    def full():
        raise OSError(errno.ENOSPC, "No space left on device")

    recorder = diagnostics.Recorder(tmp_path / "metrics.jsonl")
    monkeypatch.setattr(recorder, "flush", full)
    with pytest.raises(OSError, match="No space left"):
        recorder.close()
    assert recorder._file.closed


def test_a_full_disk_leaves_whole_lines(tmp_path):
    """A part of a line damaged the next one, lines were repeated, and the step could not be added again."""
    path = tmp_path / "metrics.jsonl"
    with diagnostics.Recorder(path, fetch_every=1) as recorder:
        recorder.add(1, {"train/loss": 1.0})
        with file_size_limit(9), pytest.raises(OSError, match="File too large"):
            recorder.add(2, {"train/loss": 2.0})
        assert path.read_bytes() == b""
        recorder.add(2, {"train/loss": 2.0})
        recorder.close()  # a file may be closed twice
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 2]


def test_steps_are_integers_from_1(tmp_path):
    with diagnostics.Recorder(tmp_path / "metrics.jsonl") as recorder:
        with pytest.raises(ValueError, match="^steps count from 1, got 0: "):
            recorder.add(0, {"train/loss": 1.0})
        with pytest.raises(TypeError, match="integer"):
            recorder.add(1.5, {"train/loss": 1.0})
        recorder.add(1, {"train/loss": 1.0})


@pytest.mark.parametrize(
    "line", ['{"step": 2, "tr', '{"train/loss": 1}', "[2]", '{"step": "2"}', '{"step": 1.5}', ""]
)
def test_a_damaged_line_is_named(tmp_path, line):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n' + line + "\n")
    message = f"^{re.escape(str(path))}, line 2, is damaged: .*: correct the line, or remove it$"
    with pytest.raises(ValueError, match=message):
        diagnostics.Recorder(path, last_step=3)
    assert [path] == list(tmp_path.iterdir()) and path.read_text() == '{"step": 1}\n' + line + "\n"


@pytest.mark.parametrize("metrics", [{"step": 1}, {"x": np.ones(2), "x/1": 0.0}])
def test_names_of_metrics_differ(tmp_path, metrics):
    with diagnostics.Recorder(tmp_path / "metrics.jsonl") as recorder:
        with pytest.raises(ValueError, match="metrics must have different names, .* twice: rename"):
            recorder.add(1, {"train/loss": 1.0} | metrics)
        recorder.add(1, {"train/loss": 1.0})  # an error changes nothing
        with pytest.raises(ValueError, match="got 'train/loss' twice at step 1: rename"):
            recorder.add(1, {"train/loss": 2.0, "x": 0.0})
    assert json.loads((tmp_path / "metrics.jsonl").read_text()) == {"step": 1, "train/loss": 1.0}


def test_the_first_nonfinite_of_complex_arrays_and_numbers():
    def first(**trees):
        found = diagnostics.first_nonfinite(**trees)
        return found.names[found.index] if found.index >= 0 else None

    assert first(x=jnp.array([1, 1j * np.nan], jnp.complex64), loss=float("nan")) == "x"
    assert first(x=1.0, y={"a": 3, "b": float("inf")}) == "y b"
    assert first(state=nnx.State({"w": nnx.Param(jnp.array(np.nan))})) == "state w"
    assert first(x=1.0, y=2 + 1j) is None
    assert first(x=jnp.arange(3)) is None
    assert first() is None


def test_sharpness_is_the_maximum_over_the_box():
    rng = np.random.default_rng(0)
    z, labels, radius = rng.normal(size=(3, 4)) * [[1], [10], [300]], np.array([2, 0, 3]), 0.01

    def loss(z):
        return (
            np.log(np.exp(z - z.max(-1, keepdims=True)).sum(-1))
            + z.max(-1)
            - z[np.arange(3), labels]
        )

    corners = np.array(list(itertools.product([-1, 1], repeat=4)))
    points = z + corners[:, None] * radius * (np.abs(z) + 1)
    best = np.max([loss(point) for point in points], axis=0)
    found = diagnostics.logit_sharpness(jnp.float32(z), labels, radius=radius)
    np.testing.assert_allclose(found, 100 * (best - loss(z)) / (1 + loss(z)), rtol=2e-3)
    assert np.isnan(diagnostics.logit_sharpness(jnp.float32(z), np.array([-1, 4, -100]))).all()
    with pytest.raises(ValueError, match=r"labels must have the shape .*\(3,\), got \(2,\)"):
        diagnostics.logit_sharpness(z, labels[:2])


def test_names_come_from_the_structure_of_the_metrics(tmp_path):
    """`Packer` derives the names before a step is traced; a `NamedIndex` is recorded as its name."""

    def step(x):
        bad = diagnostics.first_nonfinite(batch={"image": x}, loss=jnp.sum(x))
        return {"train/nonfinite": bad, "b": x, "a": jnp.sum(x)}

    packer = diagnostics.Packer.of(jax.eval_shape(step, jnp.ones(2)))
    assert packer.names == ("a", "b/0", "b/1", "train/nonfinite")
    good, bad = (
        jax.jit(lambda x: packer.pack(step(x)))(x) for x in np.float32([[1, 2], [1, np.inf]])
    )
    records = packer.records(jax.device_get({1: good, 2: bad}))
    assert records[0] == {"step": 1, "a": 3, "b/0": 1, "b/1": 2}
    assert records[1]["train/nonfinite"] == "batch image"

    with diagnostics.Recorder(tmp_path / "metrics.jsonl") as recorder:
        recorder.add(1, jax.jit(step)(jnp.float32([1, np.nan])))
    line = json.loads((tmp_path / "metrics.jsonl").read_text())
    assert line["train/nonfinite"] == "batch image" and line["a"] is None


@pytest.mark.parametrize("place", [(0, 0, 0), (3, 2, 3)])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_magnitudes_show_what_is_not_finite_on_a_mesh(bad, place):
    """The maximum over devices drops NaN."""
    mesh = jax.make_mesh((2,), ("x",), (jax.sharding.AxisType.Auto,), devices=jax.devices()[:2])
    x = jnp.ones((4, 3, 4)).at[place].set(bad)
    for spec in (jax.P("x"), jax.P(None, None, "x")):
        placed = jax.device_put(x, jax.NamedSharding(mesh, spec))
        found = jax.jit(magnitudes)(placed)
        np.testing.assert_array_equal(list(found.values()), abs(bad))


def test_magnitudes_of_more_than_2_to_the_31_numbers():
    outputs = jax.ShapeDtypeStruct((16384, 129, 1280), jnp.bfloat16)
    found = jax.eval_shape(magnitudes, outputs)
    assert {(x.shape, x.dtype.name) for x in found.values()} == {((), "float32")}
