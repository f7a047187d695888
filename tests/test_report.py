"""The report page: complete for a finished run; for any other it says what is missing."""

import itertools
import json
import os
import re
import resource
import shutil
import sys
from html.parser import HTMLParser
from types import SimpleNamespace

import numpy as np
import pytest
from matplotlib.figure import Figure

from swjax import report
from swjax.report import charts, page, records, runs, spikes
from swjax.report.__main__ import main as report_main

SCORES = {
    "zeroshot/emoji_top1": 0.2134,
    "zeroshot/emoji_chance_top1": 0.00244,
    "test/image_to_text_R@10": 0.634,
    "test/image_to_text_chance_R@10": 0.0244,
}


def prediction(name, *guesses):
    image = np.random.default_rng(0).integers(0, 256, (8, 8, 4), np.uint8)
    return SimpleNamespace(image=image, name=name, guesses=guesses, cosines=(0.5, 0.4, 0.3))


PREDICTIONS = [
    prediction("cat", "cat", "dog", "owl"),
    prediction("<b>cow</b>", "dog", "<b>cow</b>", "owl"),
    prediction("bee", "dog", "fox", "owl"),
]


def record(step):
    line = {"step": step, "time": 0.5 * step, "train/loss": 4.0 / step, "train/grad_norm": 1.0}
    line |= {"train/learning_rate": 1e-3, "train/logit_scale": 14.3}
    line |= {charts.PATCH_RMS: 2.5 if step == 3 else 0.8, "stability/rms/text/other": 1.0}
    line |= {f"{charts.FEATURES}/{block}": 0.1 * (block + 1) for block in range(11)}
    line |= {"data/skipped": 1 + step // 6}
    line |= {
        "perf/samples_per_sec_per_device": 512.0,
        "perf/data_wait_frac": 0.02,
        "perf/mfu": None,
    }
    if step % 4 == 0:
        line |= {"zeroshot/emoji_top1": 0.1, "zeroshot/emoji_chance_top1": 0.0024}
        line |= {"zeroshot/emoji_top5": 0.3, "val/image_to_text_R@10": 0.5}
    return line


@pytest.fixture
def run(tmp_path):
    """The workdir of a run of 12 steps."""
    lines = [json.dumps(record(step)) for step in range(1, 13)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    config = {
        "model": {"name": "tiny", "recipe": "switchback"},
        "data": {"name": "emoji"},
        "train": {"batch_size": 128},
        "optimizer": {"name": "stable_adamw"},
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "env.txt").write_text("command: python train.py --config=a&b\njax: 0.10.2\n")
    return tmp_path


@pytest.fixture
def workdir(run, monkeypatch):
    """That run; its page has the first chart only."""
    monkeypatch.setattr(charts, "CHARTS", dict(itertools.islice(charts.CHARTS.items(), 1)))
    return run


class Page(HTMLParser):
    """Parses a page: asserts that tags are closed, and collects the text and the images' sources."""

    VOID = ("meta", "img", "source", "br")

    def __init__(self, path):
        super().__init__()
        self.open, self.text, self.urls = [], "", []
        self.feed(path.read_text(encoding="utf-8"))
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.urls += [v for k, v in attrs if k in ("src", "srcset", "href")]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open[-1:] != ["style"]:
            self.text += data


def test_captions_with_their_nearest_images(workdir):
    """The page shows captions with their nearest images, also when rewritten; images are small files."""
    before = report.write(workdir, predictions=PREDICTIONS).stat().st_size
    noise = np.random.default_rng(0).integers(0, 256, (5, 224, 224, 3), np.uint8)
    found = [
        SimpleNamespace(
            caption=f"<i>cat {i}", images=noise, own=(i < 2,) + (False,) * 4, cosines=(0,)
        )
        for i in range(5)
    ]
    path = report.write(workdir, nearest_images=found)
    assert path.stat().st_size - before < 200 * 2**10
    report.write(workdir)
    page = Page(path)
    assert "5 evenly spaced captions of the split, not selected: for 2 the nearest" in page.text
    assert "<i>cat 3" in page.text and sum("image/jpeg" in url for url in page.urls) == 25
    assert page.text.index("Captions and their") < page.text.index("Scores and chance")


def test_page_of_a_whole_run(run):
    path = report.write(
        run, results=SCORES, predictions=PREDICTIONS, attribution="OpenMoji CC BY-SA 4.0"
    )
    assert path == run / "report" / "index.html"
    page = Page(path)
    for text in (
        "CLIP tiny in switchback on emoji",
        "12 steps of 128 · 6 s · stable_adamw",
        "21.3%chance 0.24%",
        "Skipped examples3unreadable: see skipped.log",
        "Image to text R@1063.4%2.4%26×",
        "1 right at the first guess, 2 within 3",
        "RMS reached 2.3 in 1 of 12 steps",
        "11 vision blocks",
        "the last block has 11 times the first",  # blocks in numeric order, /10 after /9
        "Waiting for data: 2%",
        "✓ cat",
        "~ <b>cow</b>",  # escaped, not markup
        "✗ bee",
        "python train.py --config=a&b",
        "0.10.2",
        "OpenMoji CC BY-SA 4.0",
    ):
        assert text in page.text, text
    assert "No " not in page.text
    # The page is self-contained: every picture is embedded, and also a file next to the page.
    assert len(page.urls) == 2 * len(charts.CHARTS) + len(PREDICTIONS)
    assert all(url.startswith("data:image/png;base64,iVBOR") for url in page.urls)
    assert {p.name for p in path.parent.glob("*.png")} == {
        name + theme for name in charts.CHARTS for theme in (".png", "-dark.png")
    }
    assert len(list(path.parent.glob("images/*.png"))) == 3


def test_run_without_evaluation_or_stable_adamw(run):
    lines = (run / "metrics.jsonl").read_text().splitlines()
    keep = re.compile(r"step|time|train/loss|train/grad_norm")
    lines = [{k: v for k, v in json.loads(line).items() if keep.fullmatch(k)} for line in lines]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    path = report.write(run)
    page = Page(path)
    for text in (
        "set config.eval.every_steps",
        "set config.diagnostics.rms; a frozen parameter has none",
        "No stability/feature_mean_abs/vision/<block>",
        "No perf/samples_per_sec_per_device",
        "No scores: the run has no test split, or has not finished",
        "No predictions",
    ):
        assert text in page.text, text
    drawn = {p.name for p in path.parent.glob("*.png")}
    assert drawn == {"loss.png", "loss-dark.png", "optimizer.png", "optimizer-dark.png"}


def test_only_the_softmax_loss_limits_the_logit_scale():
    metrics = {"train/logit_scale": records.Series(np.array([1]), np.array([112.0]))}
    assert "at most 100" in charts.draw_optimizer(Figure(), metrics, charts.LIGHT)
    metrics["train/logit_bias"] = metrics["train/logit_scale"]
    assert charts.draw_optimizer(Figure(), metrics, charts.LIGHT) == ""


def test_empty_workdir(tmp_path):
    page = Page(report.write(tmp_path))
    assert "No train/loss in metrics.jsonl: the run has not logged a step yet" in page.text
    assert "the run has no env.txt" in page.text


def test_diverged_run_and_a_line_cut_off(workdir):
    with open(workdir / "metrics.jsonl", "a") as file:
        for step in (13, 14):
            file.write(json.dumps(record(step) | {"train/loss": None}) + "\n")
        file.write('{"step": 15, "train/lo')
    assert "Not finite in 2 of 14 steps, first at step 13" in Page(report.write(workdir)).text


def test_a_full_disk_keeps_the_saved_scores(tmp_path):
    """A damaged file ended the run again, when it was resumed."""
    report.write(tmp_path, results=SCORES)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            report.write(tmp_path, results={})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "Zero-shot top-1, emoji" in report.write(tmp_path).read_text()


def test_making_the_page_again_keeps_scores_and_predictions(workdir, monkeypatch, capsys):
    path = report.write(workdir, results=SCORES, predictions=PREDICTIONS, attribution="by us")
    before = path.read_bytes()
    path.unlink()
    monkeypatch.setattr(sys, "argv", ["swjax report", str(workdir)])
    assert report_main() == 0
    assert capsys.readouterr() == (f"{path}\n", "")
    assert path.read_bytes() == before


def test_names_that_are_not_utf_8(workdir):
    """Python represents the bytes of such a file name by surrogates."""
    foreign = prediction("caf\udce9", "cat", "dog", "owl")
    path = report.write(workdir, predictions=[foreign])
    assert "caf\\udce9" in path.read_text("utf-8")
    assert report.write(workdir).read_text("utf-8").count("caf\\udce9") > 0


@pytest.mark.parametrize(
    "file, text, said",
    [
        ("", "", "is not a directory: "),
        ("notes.txt", "", "is not a run: it has neither config.json nor metrics.jsonl"),
        ("config.json", '{"model', "config.json is damaged: "),
        ("config.json", "[]", "config.json is damaged: it holds no JSON object: "),
        ("report", "a file", "File exists"),
    ],
)
def test_what_is_no_run_is_one_line(file, text, said, tmp_path, monkeypatch, capsys):
    workdir = tmp_path / "run"
    if file:
        workdir.mkdir()
        if file == "report":
            (workdir / "metrics.jsonl").touch()
        (workdir / file).write_text(text)
    monkeypatch.setattr(sys, "argv", ["swjax report", str(workdir)])
    assert report_main() == 2
    error = capsys.readouterr().err
    assert error.startswith("swjax report: ") and error.count("\n") == 1 and said in error


# --- files from others --------------------------------------------------------------------------------


def save_results(workdir, **changes):
    """Changes report/results.json."""
    path = workdir / "report" / "results.json"
    path.parent.mkdir(exist_ok=True)
    held = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(held | changes))


def picture_named(name):
    return {"predictions": [{"image": name, "name": "cat", "guesses": ["dog"]}]}


@pytest.mark.parametrize(
    "name", ["/etc/hostname", "../../secret", "images/linked.png", "images/text.png", "pipe", ""]
)
def test_a_page_embeds_only_pictures_of_its_folder(tmp_path, name):
    (tmp_path / "secret").write_bytes(b"\x89PNG\r\n\x1a\nSECRET")
    workdir = tmp_path / "run"
    images = workdir / "report" / "images"
    images.mkdir(parents=True)
    (images / "linked.png").symlink_to(tmp_path / "secret")
    (images / "text.png").write_text("a text of the run")
    os.mkfifo(workdir / "report" / "pipe")
    save_results(workdir, **picture_named(name))
    page = Page(report.write(workdir))
    assert not page.urls and "1 picture left out: " in page.text and "cat" in page.text


@pytest.mark.parametrize(
    "name",
    ["config.json", "config_history.jsonl", "env.txt", "metrics.jsonl", "report/results.json"],
)
def test_files_that_link_out_of_the_run_are_not_read(workdir, tmp_path_factory, name):
    secret = tmp_path_factory.mktemp("other") / "secret"
    secret.write_text('{"step": 1, "train/loss": 0.5, "key": "SECRET"}')
    (workdir / "report").mkdir()
    (workdir / name).unlink(missing_ok=True)
    (workdir / name).symlink_to(secret)
    with pytest.raises(ValueError, match=f"{name} is a link out of .*: copy the file"):
        report.write(workdir)
    assert not (workdir / "report" / "index.html").exists()


def test_nothing_is_written_through_links(workdir, tmp_path_factory):
    other = tmp_path_factory.mktemp("other")
    victim = other / "victim"
    victim.write_text("mine")
    (workdir / "report" / "images").mkdir(parents=True)
    names = ("index.html", "loss.png", "images/00.png", f"index.html.{os.getpid()}.part")
    for name in names:
        (workdir / "report" / name).symlink_to(victim)
    report.write(workdir, predictions=PREDICTIONS)
    assert victim.read_text() == "mine"
    assert not any((workdir / "report" / name).is_symlink() for name in names)
    shutil.rmtree(workdir / "report")
    (workdir / "report").symlink_to(other)
    with pytest.raises(ValueError, match="report is a link out of"):
        report.write(workdir)
    assert [path.name for path in other.iterdir()] == ["victim"]


@pytest.mark.parametrize(
    "changes",
    [
        {"results": []},
        {"results": {"a_top1": "0.5"}},
        {"results": {"a_top1": 10**400}},
        {"predictions": {"image": "images/00.png"}},
        {"predictions": [{"name": "cat", "guesses": []}]},
        {"predictions": [{"image": "a", "name": "cat", "guesses": [1]}]},
        {"nearest_images": [{"caption": "cat", "images": ["a"], "own": [0]}]},
        {"nearest_images": [{"caption": "cat", "images": ["a"], "own": [True, False]}]},
        {"attribution": None},
    ],
)
def test_malformed_results_are_one_line(tmp_path, changes):
    save_results(tmp_path, **changes)
    with pytest.raises(ValueError, match=r"results.json is damaged: \w+.* must ") as error:
        report.write(tmp_path)
    assert "\n" not in str(error.value) and len(str(error.value)) < 400


NESTED = "[" * 100_000


@pytest.mark.parametrize(
    "line",
    [
        '{"step": 1e300, "train/loss": 1}',
        '{"step": -1, "train/loss": 1}',
        '{"step": true, "train/loss": 1}',
        '{"step": NaN, "train/loss": 1}',
        '{"step": 2, "train/loss": 1%s}' % ("0" * 400),
        '{"step": 2, "train/loss": true}',
        '{"step": 2, "train/loss": [1]}',
        NESTED,
        "1" * 5000,
    ],
)
def test_a_malformed_metric_is_one_line(tmp_path, line):
    (tmp_path / "metrics.jsonl").write_text(f'{line}\n{{"step": 3}}\n')
    for read in (report.write, spikes.write):
        with pytest.raises(ValueError, match="metrics.jsonl, line 1") as error:
            read(tmp_path)
        assert "\n" not in str(error.value) and len(str(error.value)) < 400


@pytest.mark.parametrize("text", [NESTED, '{"a":' * 500 + "1" + "}" * 500, "", "\0", '"a"'])
def test_a_malformed_config_is_one_line(tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError, match="config.json is damaged") as error:
        report.write(tmp_path)
    assert "\n" not in str(error.value)


def test_configs_of_other_shapes_are_shown(tmp_path):
    (tmp_path / "config.json").write_text(
        '{"model": [1], "data": null, "train": 3, "optimizer": ""}'
    )
    assert "unknown recipe" in Page(report.write(tmp_path)).text


def test_changes_of_the_config_are_shown_with_their_steps(workdir):
    change = "data.dir: 'ftp://bob:PASSWORD@host/x' -> '<b>'"
    entries = [{"step": 0, "changes": []}, {"step": 400, "changes": [change]}]
    history = workdir / "config_history.jsonl"
    history.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    text = Page(report.write(workdir)).text
    assert "after step 400" in text and "ftp://***@host/x' -> '<b>'" in text
    for damaged in ('{"step": 0', '{"step": 1e300, "changes": []}', '{"step": 1, "changes": [2]}'):
        history.write_text(damaged)
        with pytest.raises(ValueError, match="config_history.jsonl, line 1,.* damaged") as error:
            report.write(workdir)
        assert "\n" not in str(error.value)


def test_credentials_are_masked(workdir):
    config = json.loads((workdir / "config.json").read_text())
    config["data"] |= {"dir": "ftp://bob:PASSWORD@host/x", "list": ["https://h/x?sig=PASSWORD"]}
    (workdir / "config.json").write_text(json.dumps(config))
    (workdir / "env.txt").write_text("command: python train.py --dir=ftp://bob:PASSWORD@host/x\n")
    text = report.write(workdir).read_text()
    assert "PASSWORD" not in text and "ftp://***@host/x" in text
    assert "PASSWORD" not in str(runs.read(workdir, "run").config)


def test_names_in_charts_are_not_mathematics(tmp_path):
    lines = [{"step": step, "train/loss": 1.0, "stability/rms/$\\frac_\ud800\0": 3.0}
             for step in range(1, 200)]  # fmt: skip
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    path, _ = spikes.write(tmp_path)
    assert len(Page(path).urls) == 4


@pytest.mark.parametrize("last", [400, 1000])
def test_the_axis_of_one_evaluation_begins_at_0(last):
    metrics = {"zeroshot/pets_top1": records.Series(np.array([400]), np.array([0.5]))}
    metrics["train/loss"] = records.Series(np.array([1, last]), np.array([1.0, 0.5]))
    figure = Figure()
    charts.draw_accuracy(figure, metrics, charts.LIGHT)
    assert figure.axes[0].get_xlim() == (0, 1.02 * last)


@pytest.mark.parametrize("ends", [(0.64, 0.64, 0.64), (0.64, 0.62, 0.1), (0.02, 0.01, 0.0)])
def test_labels_of_scores_do_not_overlap(ends):
    steps = np.arange(1, 4)
    names = ("val/image_to_text_R@10", "zeroshot/emoji_top5", "zeroshot/emoji_top1")
    metrics = {
        name: records.Series(steps, np.linspace(0, end, 3))
        for name, end in zip(names, ends, strict=True)
    }
    figure = Figure(figsize=(4.8, 2.9), layout="constrained")
    charts.draw_accuracy(figure, metrics, charts.LIGHT)
    figure.canvas.draw()
    (axes,) = figure.axes
    boxes = [text.get_window_extent() for text in axes.texts]
    assert not any(a.overlaps(b) for a, b in itertools.combinations(boxes, 2))
    assert all(float(label).is_integer() for label in axes.get_xticks())


def test_scores_name_their_set():
    """A run may score several labelled sets besides the validation split."""
    scores = {"zeroshot/pets_top1": 0.5, "zeroshot/pets_chance_top1": 0.25}
    scores |= {"zeroshot/cars_top1": 0.4, "zeroshot/cars_chance_top1": 0.1}
    metrics = {
        name: records.Series(np.array([1]), np.array([score])) for name, score in scores.items()
    }
    caption = charts.draw_accuracy(Figure(), metrics, charts.LIGHT)
    assert caption == "In the log: zeroshot/pets_top1; chance is 25.0% for top-1."
    assert page.label("zeroshot/cars_top1") == "Zero-shot top-1, cars"


# --- several runs -------------------------------------------------------------------------------------


@pytest.fixture
def two_runs(workdir, tmp_path):
    """A folder with a finished run, and a second run with another recipe."""
    folder = tmp_path / "runs"
    for name, recipe, final in (("a", "switchback", True), ("b/<b>", "standard", False)):
        run = folder / name
        run.mkdir(parents=True)
        for file in ("metrics.jsonl", "config.json"):
            (run / file).write_text((workdir / file).read_text())
        config = json.loads((run / "config.json").read_text())
        config["model"]["recipe"] = recipe
        (run / "config.json").write_text(json.dumps(config))
        if final:
            (run / "results.json").write_text(json.dumps({"step": 12, "scores": SCORES}))
    return folder


@pytest.fixture
def runs_command(monkeypatch, capsys):
    """A function that runs `swjax runs` with these arguments."""

    def command(*arguments):
        monkeypatch.setattr(sys, "argv", ["swjax runs", *map(str, arguments)])
        code, printed = runs.main(), capsys.readouterr()
        return SimpleNamespace(returncode=code, stdout=printed.out, stderr=printed.err)

    return command


def test_a_run_of_one_step_without_a_split_to_score(tmp_path):
    """It was listed as unfinished, with the throughput nan."""
    line = {"step": 1, "train/loss": 0.5, "perf/samples_per_sec_per_device": None}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    (tmp_path / "config.json").write_text('{"train": {"steps": 1}}')
    (tmp_path / "results.json").write_text('{"step": 1, "scores": {}}')
    _, row = runs.table([runs.read(tmp_path, "r")])
    assert row == ["r", "finished, 1", "0.500", "", ""]
    metrics = records.read(tmp_path / "metrics.jsonl", report.METRICS)
    assert "Throughput" not in "".join(page._tiles({}, metrics))
    values = records.Series(np.arange(3), np.array([7.0, 8.0, np.nan]))
    assert values.last_finite == 8


def test_runs_are_listed_with_what_differs(two_runs, runs_command):
    done = runs_command(two_runs)
    assert done.returncode == 0, done.stderr
    header, first, second = done.stdout.splitlines()
    assert header.split() == (
        "run state loss Zero-shot top-1, emoji Image to text R@10 samples/s/device time recipe".split()
    )
    assert first.split() == "a finished, 12 0.333 21.3% 63.4% 512 6 s switchback".split()
    assert second.split() == "b/<b> at step 12 0.333 512 6 s standard".split()


def test_a_run_of_another_version_differs_in_shared_keys_alone(two_runs, runs_command):
    """Keys that only newer versions have are no differences, and names of columns are unambiguous."""
    for number, run in enumerate(("a", "b/<b>")):
        path = two_runs / run / "config.json"
        config = json.loads(path.read_text())
        config |= {name: {"every_steps": number} for name in ("eval", "checkpoint")}
        if number:
            config["added_later"] = {"key": 1}
        path.write_text(json.dumps(config))
    header, *_, more = runs_command(two_runs).stdout.splitlines()
    assert header.split()[-2:] == ["recipe", "eval.every_steps"]
    assert more.endswith(": checkpoint.every_steps")


def test_runs_on_one_page(two_runs, runs_command, tmp_path, capsys):
    done = runs_command(two_runs / "a", two_runs / "b", f"--page={tmp_path}/both.html")
    assert done.returncode == 0, done.stderr
    text = (tmp_path / "both.html").read_text()
    assert "2 runs" in text and "data:image/png" in text and "&lt;b&gt;" in text
    assert not list(tmp_path.glob("both.*.png"))
    with pytest.raises(SystemExit, match="2"):
        runs_command(two_runs, f"--page={tmp_path}/none/both.html")
    assert "none' does not exist: make it" in capsys.readouterr().err


def test_unlike_runs_are_short_printable_lines(two_runs, capsys, monkeypatch):
    for number, run in enumerate(("a", "b/<b>")):
        config = json.loads((two_runs / run / "config.json").read_text())
        config["data"]["dir"] = "\x1b[31m" + "long" * 100 * number
        config |= {"optimizer": {f"key{i}": number * 10**9 for i in range(30)}}
        (two_runs / run / "config.json").write_text(json.dumps(config))
    monkeypatch.setattr(sys, "argv", ["swjax runs", str(two_runs)])
    assert runs.main() == 0
    said = capsys.readouterr().out
    assert "\x1b" not in said and max(map(len, said.splitlines())) <= 140
    assert "columns more, which --page shows: " in said.splitlines()[-1]


def test_folders_given_in_different_ways(two_runs, runs_command, monkeypatch):
    """Relative and absolute ones, a run twice, and a run inside of the current folder."""
    monkeypatch.chdir(two_runs / "a")
    for folders in ((two_runs / "a", "../b", "."), ("..",)):
        rows = runs_command(*folders).stdout.splitlines()
        assert [row.split()[0] for row in rows] == ["run", "a", "b/<b>"]
    (two_runs / "b" / "<b>").rename(two_runs / "a" / "inner")
    (two_runs / "a" / "exported").mkdir()
    (two_runs / "a" / "exported" / "config.json").write_text('{"model_type": "clip"}')
    rows = runs_command(".").stdout.splitlines()
    assert [row.split()[0] for row in rows] == ["run", "a", "a/inner"]


@pytest.mark.parametrize("name", ["config.json", "results.json", "metrics.jsonl"])
def test_a_damaged_run_is_left_out_and_told(two_runs, runs_command, name):
    log = '{"step": 2}\n' * (name == "metrics.jsonl")  # records follow the damaged line
    (two_runs / "a" / name).write_text('{"model\n' + log)
    done = runs_command(two_runs)
    assert len(done.stderr.splitlines()) == 1
    assert done.stderr.startswith(f"swjax runs: {two_runs}/a/{name}")
    assert " is damaged: " in done.stderr
    assert [row.split()[0] for row in done.stdout.splitlines()] == ["run", "b/<b>"]


def test_no_run_is_one_line(runs_command, tmp_path):
    (tmp_path / "nothing").mkdir()
    (tmp_path / "nothing" / "config.json").write_text('{"model_type": "clip"}')
    done = runs_command(tmp_path / "nothing")
    assert done.returncode == 2
    assert done.stderr == (
        f"swjax runs: no run in {tmp_path}/nothing: give folders of runs, or a folder that contains them\n"
    )
