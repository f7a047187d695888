"""The one training loop: CLIP with a config's recipe, optimizer and data, on one device or many.

Read `train` from top to bottom; what it calls stands below it, in that order. A run is a directory:
config.json  env.txt  metrics.jsonl  skipped.log  tensorboard/  checkpoints/<step>/  results.json
report/
"""

import errno
import gc
import json
import math
import re
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from swjax import data, evaluators, recipes, report
from swjax.diagnostics import Packer, Rules, Watch
from swjax.models import clip, sharding
from swjax.nnx import set_layouts
from swjax.training import config as config_lib
from swjax.training import distributed, environment
from swjax.training.checkpoint import Checkpoints, check_shared, lock
from swjax.training.config import ConfigError, RunError, blame, choice
from swjax.training.interrupt import catch
from swjax.training.metrics import Meter, MetricLog, Progress, StepClock
from swjax.training.step import Health, make_optimizer, make_schedule, make_train_step, partition

# What a disk that is full, read-only or broken answers, and the remedy.
DISK = {
    errno.ENOSPC: "give it room",
    errno.EDQUOT: "give it room",
    errno.EFBIG: "give it room",
    errno.EROFS: "make it writable",
    errno.EACCES: "make it writable",
    errno.EPERM: "make it writable",
    errno.EIO: "mend the disk",
    errno.ENOENT: "name a directory that can be made",
    errno.ENOTDIR: "name a directory, not a file",
    errno.EEXIST: "name a directory, not a file",
}
MAX_ROLLBACKS = 3  # to one checkpoint
PREDICTIONS = 24  # unseen images in the report


def train_and_evaluate(config, workdir: str | Path) -> int:
    """Trains, evaluates and reports one run; goes on where an interrupted one stopped.

    Args:
      config: every key of configs/common.py.
      workdir: directory of the run; created.

    Returns:
      The exit code: 0 finished, or saved and interrupted; 1 diverged.

    Raises:
      ConfigError: a mistake in the config, in one line.
      RunError: the disk failed, likewise.
    """
    distributed.start()
    distributed.check_same_config(config)
    check(config)
    workdir = Path(workdir)
    number = f".{jax.process_index()}" * (not distributed.is_first())
    bad_examples = data.log_to(workdir / f"skipped{number}.log")
    with ExitStack() as stack:
        stack.enter_context(blame_disk(workdir))
        stack.enter_context(distributed.blame_peers())
        distributed.first_does(lambda: stack.enter_context(lock(workdir)))
        check_shared(workdir)
        interrupt = stack.enter_context(catch())
        stack.enter_context(bad_examples)
        stack.enter_context(blame_data())
        code = 0 if is_finished(config, workdir) else train(config, workdir, interrupt)
        if code == 0 and distributed.is_first() and (workdir / "results.json").exists():
            tell_results(workdir)
        return code


def train(config, workdir: Path, interrupt) -> int:
    """The loop; `interrupt.requested` turns true when the run shall end early."""
    # ---------------------------------------------------------------------------------
    # Devices, data, model, optimizer
    # ---------------------------------------------------------------------------------
    mesh, cfg = check(config)
    use_compilation_cache(config)
    with distributed.all_or_none():
        source = open_source(config, "train")
        for split in ("val", "test"):
            open_source(config, split)  # a mistake shows now, not at the first evaluation
    total, schedule, optimizer = plan(config, source)
    progress = Progress(total)

    # ---------------------------------------------------------------------------------
    # State: from this workdir, from `resume`, from `init_from`, or from scratch
    # ---------------------------------------------------------------------------------
    init, graphdef = make_init(config, cfg, optimizer)
    like = sharding.abstract_state(jax.eval_shape(init), mesh)
    checkpoints = Checkpoints(workdir, keep=config.checkpoint.keep)
    state, position = init_or_restore(config, checkpoints, init, like)
    step = int(state["step"])
    distributed.first_does(lambda: record_setup(config, workdir, progress, step))
    packer = Packer()
    train_step = compile_step(make_train_step(config, graphdef, optimizer, schedule, packer), like)
    health = Health(config, graphdef, like["params"], steps=total)
    evaluate = make_evaluate(config, graphdef, mesh)
    share = sharding.batch_share(mesh)
    batches = open_batches(config, source, position, share)
    gather = make_gather(share)
    if config.train.nan_policy == "rollback" and checkpoints.latest_step() is None:
        checkpoints.save(step, state, batches.position(gather))

    # ---------------------------------------------------------------------------------
    # Train
    # ---------------------------------------------------------------------------------
    log = MetricLog(workdir, config, last_step=step)
    watch, clock = Watch(Rules.of_run(total)), StepClock()
    meter = Meter(config.train.batch_size, 3 * clip.flops_per_example(cfg))
    pending, timed, skipped, previous, rollbacks, stopping = {}, {}, {}, None, 0, False
    with (
        closing(log),
        closing(clock),
        closing(batches),
        closing(checkpoints),
        ExitStack() as at_end,
    ):
        while step < total and not stopping:
            with meter.waiting():
                batch = next(batches)
            clock.lap("data")
            batch = sharding.shard_batch(batch, mesh)
            health.before(step + 1, state, batch)
            state, vector = train_step(state, batch)
            step += 1
            pending[step], skipped[step] = vector, batches.skipped
            if previous is None:
                jax.block_until_ready(vector)
                gc.collect()
                gc.freeze()  # a collection of what compiling left took 0.13 s, each 1,000 steps or so
                at_end.callback(gc.unfreeze)
                progress.say(f"step {step} took {meter.restart():.0f} s, most of it compiling")
            clock.lap("dispatch")
            jax.block_until_ready(previous)  # at most two steps in flight
            previous = vector
            clock.lap("device")
            timed[step] = clock.step(saving=checkpoints.is_saving())

            stopping = distributed.shall_stop(step, interrupt.requested)
            evaluating = step == total or is_due(step, config.eval.every_steps)
            saving = stopping or step == total or is_due(step, config.checkpoint.every_steps)
            # What is due is logged a step later, beside which the device has that step to do.
            last = step if evaluating or saving else step - 1
            if not (last == step or is_due(last, config.log.every_steps)) or last not in pending:
                continue
            done = [s for s in pending if s <= last]
            records = packer.records(jax.device_get({s: pending.pop(s) for s in done}))
            bad_examples = gather(np.array([skipped.pop(s) for s in done], np.int64))
            bad_examples = bad_examples.sum(axis=0).tolist()
            records = [record | {"data/skipped": bad} for record, bad in zip(records, bad_examples)]
            measured = health.records(last)
            records = [r | timed.pop(r["step"]) | measured.get(r["step"], {}) for r in records]
            perf = meter.read()
            meter.restart()
            checkpoints.check()
            bad = first_bad(records)
            if bad and config.train.nan_policy == "skip":
                progress.say(
                    f"{bad}: skipped, {sum(r['train/skipped'] for r in records):.0f} in all"
                )
                bad = first_bad(records, kind="parameter")  # that no skipping mends
            if bad and config.train.nan_policy == "rollback" and rollbacks < MAX_ROLLBACKS:
                rollbacks += 1
                state, _ = checkpoints.restore(like)
                step = int(state["step"])  # the data that led here is left out: batches go on
                pending, timed, skipped = {}, {}, {}
                log.rewind(step)
                watch.restart()
                meter.restart()
                progress.say(f"{bad}: back to step {step}, past the data of these steps")
                clock.lap("rollback")
                continue
            clock.lap("log")
            if evaluating and not bad:
                records[-1] |= evaluate(state, "val")[0]
                meter.restart()  # throughput leaves it out
                clock.lap("evaluation")
            log.write([record | perf for record in records])
            for event in watch.update(records):
                progress.say(event)
            progress.update(records[-1] | perf)
            if bad:
                progress.say(f"{bad}: stopped; config.train.nan_policy={config.train.nan_policy!r}")
                return 1
            clock.lap("log")
            if saving:
                checkpoints.save(step, state, batches.position(gather))
                rollbacks = 0
                clock.lap("saving")
    if step < total:
        progress.say(f"interrupted: step {step} is saved in {workdir}; the same command goes on")
        return 0

    # ---------------------------------------------------------------------------------
    # The test split, once
    # ---------------------------------------------------------------------------------
    scores, predictions = evaluate(state, "test", examples=PREDICTIONS)

    def write():
        if config.report.enabled:
            report.write(
                workdir, results=scores, predictions=predictions, attribution=source.attribution
            )
        write_results(workdir, step, scores)

    distributed.first_does(write)
    return 0


def use_compilation_cache(config) -> None:
    """Keeps compiled programs where the config says; a program found there computes the same bits."""
    if config.train.compilation_cache:
        cache = str(Path(config.train.compilation_cache).absolute())
        jax.config.update("jax_compilation_cache_dir", cache)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)  # evaluators' too


def check(config) -> tuple[jax.sharding.Mesh, clip.CLIPConfig]:
    """Checks all that needs no data; returns the devices' mesh and the model's configuration."""
    with blame("mesh"):
        mesh = sharding.make_mesh(**config.mesh)
        sharding.batch_share(mesh)
    config_lib.validate(config, batch_shards=mesh.shape["data"] * mesh.shape["fsdp"])
    return mesh, model_config(config)


def model_config(config) -> clip.CLIPConfig:
    """The model that the config describes."""
    c = config.model
    choice("model.name", c.name, clip.CONFIGS)
    choice("model.recipe", c.recipe, recipes.RECIPES)
    sizes = {tower: {k: v for k, v in c[tower].items() if v} for tower in ("vision", "text")}
    sizes["vision"]["image_size"] = config.data.image_size
    sizes["text"]["context_length"] = config.data.context_length
    if c.embed_dim:
        sizes["embed_dim"] = c.embed_dim
    if c.attention in ("cudnn", "triton") and jax.default_backend() != "gpu":
        raise ConfigError(
            f"config.model.attention={c.attention!r} needs a GPU: set it to 'xla' or ''"
        )
    if config.train.loss == "sigmoid":  # where SigLIP starts
        sizes |= {"init_logit_scale": math.log(10), "init_logit_bias": -10.0}
    same = ("recipe", "dtype", "remat", "scan_layers", "qk_norm", "gelu", "patch_dropout")
    with blame("model"):
        return clip.config(
            c.name,
            attention=c.attention or None,
            layer_scale=0.0 if c.layer_scale else None,
            **{name: c[name] for name in same},
            **sizes,
        )


def plan(config, source):
    """How many steps a run has, its learning rate at each, and its optimizer."""
    sizes = {"batch_size": config.train.batch_size, "dataset_size": len(source)}
    total = config_lib.steps(config.train, "", **sizes)
    schedule = make_schedule(config, total, config_lib.steps(config.schedule, "warmup_", **sizes))
    return total, schedule, make_optimizer(config, schedule)


def compile_step(train_step, like, **options: str):
    """The step as it is run: the state's memory is used again, and the new state lies like the old. Every
    process has all metrics.

    Args:
      train_step: of `swjax.training.step.make_train_step`.
      like: the state, or ShapeDtypeStructs like it, with shardings.
      **options: of the compiler, beside those of `sharding.compiler_options`.
    """
    everywhere = like["step"].sharding
    return jax.jit(
        train_step,
        donate_argnums=0,
        out_shardings=(jax.tree.map(lambda x: x.sharding, like), everywhere),
        compiler_options=sharding.compiler_options(everywhere.mesh) | options,
    )


def make_init(config, cfg: clip.CLIPConfig, optimizer):
    """Returns a function () -> the first train state, and the model's graph definition.

    The state is {"params", "opt_state", "step"}, and "ema" if the config averages parameters: plain
    nested dicts of arrays, so that paths and checkpoints need no Flax.
    """

    def model():
        clip_model = clip.CLIP(cfg, rngs=nnx.Rngs(config.train.seed))
        dtype, once = config.train.reduce_dtype, config.train.reduce_once
        return set_layouts(clip_model, sharding.spec_of, reduce_dtype=dtype, reduce_later=once)

    def init():
        params = nnx.to_pure_dict(nnx.state(model(), nnx.Param))
        trainable, _ = partition(params, config.optimizer.freeze)
        state = {"params": params, "opt_state": optimizer.init(trainable), "step": jnp.int32(0)}
        return state | ({"ema": params} if config.train.ema_decay else {})

    return init, nnx.graphdef(nnx.eval_shape(model))


def init_or_restore(config, checkpoints: Checkpoints, init, like):
    """The first train state of this process and its position in the data; None: the beginning.

    Looks in this workdir, then in `checkpoint.resume`, then takes parameters from
    `checkpoint.init_from`, then starts from scratch.
    """
    if checkpoints.latest_step() is not None:
        with config_lib.blame_changes(checkpoints.directory.parent, config):
            return checkpoints.restore(like)
    if config.checkpoint.resume:
        with config_lib.blame_changes(Path(config.checkpoint.resume), config):
            return Checkpoints.of("checkpoint.resume", config.checkpoint.resume).restore(like)
    return first_state(config, init, like), None


def first_state(config, init, like):
    """The train state of step 0."""
    shardings = jax.tree.map(lambda x: x.sharding, like)
    # It runs once: optimizing it would take longer.
    options = {"xla_backend_optimization_level": 0}
    state = jax.jit(init, out_shardings=shardings, compiler_options=options)()
    if config.checkpoint.init_from:
        other = Checkpoints.of("checkpoint.init_from", config.checkpoint.init_from)
        state["params"] = other.restore_params(like["params"])
        if "ema" in state:
            state["ema"] = jax.tree.map(jnp.copy, state["params"])
    return state


def open_source(config, split: str):
    """The examples of a split, "train", "val" or "test", by number; prepared at first use.

    Returns:
      The source; None if the config names no such split, and that is not "train".
    """
    c = config.data
    name = c.name if split == "train" else config.eval.data or c.name
    if name != "mixture":
        return open_part(c, name, split)
    if split != "train":
        raise ConfigError(
            "config.eval.data='' but a mixture has no val and test splits: name the data set to "
            f"evaluate on, {', '.join(c.mixture)} or another"
        )
    for part, settings in c.mixture.items():
        if not {"name", "weight"} <= set(settings):
            raise ConfigError(
                f"config.data.mixture.{part} needs a name, of a data set, and a weight; it has "
                f"{', '.join(settings)}"
            )
    parts = {part: (open_part(c, part, split), c.mixture[part].weight) for part in c.mixture}
    with blame("data.mixture"):
        return data.Mixture(parts)


def open_part(c, name: str, split: str):
    """A split of a data set, or of a part of the mixture; see `open_source`."""
    part = c.mixture[name].to_dict() if name in c.mixture else {"name": name}
    kind = part.pop("name")
    options = c[kind].to_dict() if kind in c else {}
    splits = options.pop("splits", {}) | part.pop("splits", {})
    options |= {key: value for key, value in part.items() if key != "weight"}
    if kind == "synthetic":
        options["image_size"] = c.image_size
    where = splits.get(split, split)
    if not where and split != "train":
        return None
    with blame("data"):
        if not where:
            raise ValueError(f"{name}.splits.{split} is empty: name the data to train on")
        return data.source(kind, where, data_dir=c.dir, **options)


def open_batches(config, source, position: dict | None, share: sharding.Share):
    """This process's part of every training batch, from a position on."""
    c = config.data
    with blame("data"):
        return data.loader(
            source,
            batch_size=config.train.batch_size // share.count,
            seed=config.train.seed,
            position=position,
            context_length=c.context_length,
            image_size=c.image_size,
            process_index=share.index,
            process_count=share.count,
            workers=c.workers,
            shuffle=c.shuffle,
            shuffle_shards=c.shuffle_shards,
            on_bad=c.on_bad,
            max_bad_share=c.max_bad_share,
        )


@contextmanager
def blame_data():
    """Says in one line that too many examples cannot be read, or that nobody is left to read them."""
    try:
        yield
    except data.BadData as error:
        raise ConfigError(
            f"config.data: {error}; config.data.max_bad_share and on_bad say what is allowed"
        ) from error
    except data.LostProcess as error:
        raise RunError(
            f"{error}; config.data.workers is their number. That mended, the same command goes on"
        ) from error


@contextmanager
def blame_disk(workdir: Path):
    """Says in one line that something cannot be written, with the path that the system names."""
    try:
        yield
    except OSError as error:
        if error.errno not in DISK:
            raise
        remedy = DISK[error.errno]
        raise RunError(
            f"cannot write {error.filename or str(workdir)!r}: {error.strerror}; {remedy}, and the same "
            f"command goes on"
        ) from error


def make_gather(share: sharding.Share):
    """Returns a function: int64 [n] of every process -> [parts of the batch, n] on each."""
    return lambda own: distributed.gather(own)[list(share.readers)]


def make_evaluate(config, graphdef, mesh):
    """Returns a function (state, split, examples) -> (scores by name, that many predictions)."""

    embed = evaluators.predictor(graphdef, config.data.image_size)

    def predict(params, batch):
        return embed(params, sharding.shard_batch(batch, mesh))

    def evaluate(state, split, examples=0):
        source, params = open_source(config, split), state.get("ema", state["params"])
        if source is None:
            return {}, []
        sizes = {
            "batch_size": config.eval.batch_size,
            "context_length": config.data.context_length,
            "image_size": config.data.image_size,
            "share": sharding.batch_share(mesh),
        }
        retrieval = evaluators.Retrieval(
            predict,
            source,
            name=split,
            captions_per_image=config.eval.captions_per_image or None,
            **sizes,
        )
        scores = retrieval.run(params)
        if not source.class_names:
            return scores, []
        zero_shot = evaluators.ZeroShot(
            predict,
            source,
            templates=source.templates,
            name=f"{config.eval.data or config.data.name}_{split}",
            **sizes,
        )
        predictions = zero_shot.predictions(params, count=examples) if examples else []
        return zero_shot.run(params) | scores, predictions

    return evaluate


def is_due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def first_bad(records: list[dict], kind: str = "") -> str:
    """Names the first step with something not finite, and the tensor where it began; "": there is none.

    Args:
      records: of steps.
      kind: looks only for tensors of this kind, as in "parameter".
    """
    for record in records:
        tensor, where = record.get("train/nonfinite", ""), f"at step {record['step']}"
        if kind and not tensor.startswith(kind):
            continue
        for name in ("train/loss", "train/grad_norm"):
            if not math.isfinite(record[name]):
                began = f", where {tensor} is not finite" if tensor else ""
                return f"{name} is {record[name]} {where}{began}"
        if tensor:
            return f"{tensor} is not finite {where}"
    return ""


def record_setup(config, workdir: Path, progress: Progress, step: int) -> None:
    """Writes config.json and env.txt; says what runs, and what changed since the run began."""
    path = workdir / "config.json"
    if step and path.exists():
        for change in config_lib.changes(path.read_text(errors="replace"), config):
            progress.say(f"the config has changed since this run began: {change}")
    path.write_text(config_lib.to_json(config))
    (workdir / "env.txt").write_text(environment.describe())
    progress.say(
        f"{config.model.name} in {config.model.recipe} on {jax.device_count()} x "
        f"{jax.devices()[0].device_kind}, {config.data.name}, {workdir}"
        + (f": going on at step {step}" if step else "")
    )


def is_finished(config, workdir: Path) -> bool:
    """Whether nothing of this run is left to do.

    Raises:
      ConfigError: a run with another config has finished here.
    """
    if not (workdir / "results.json").exists():
        return False
    path = workdir / "config.json"
    changed = config_lib.changes(path.read_text(errors="replace"), config) if path.exists() else []
    if changed:
        raise ConfigError(
            f"{workdir} holds a finished run with another config ({'; '.join(changed[:3])}): "
            f"use another --workdir"
        )
    return (workdir / "report" / "index.html").exists() or not config.report.enabled


def write_results(workdir: Path, step: int, scores: dict) -> None:
    """Writes results.json, whose presence says that the run is over, in one piece."""
    part = workdir / "results.part"
    part.write_text(json.dumps({"step": step, "scores": scores}, indent=2) + "\n")
    part.rename(workdir / "results.json")


def tell_results(workdir: Path) -> None:
    """Prints the scores on the test split, each beside chance, and where the report is."""
    text = (workdir / "results.json").read_text(errors="replace")
    remedy = "remove it, and the same command makes it again"
    results = config_lib.read_json("results.json", text, remedy=remedy, step=int, scores=dict)
    lines = []
    for name, score in results["scores"].items():
        chance = results["scores"].get(re.sub(r"_(top\d+|R@\d+)$", r"_chance_\1", name))
        if isinstance(score, float) and isinstance(chance, float):
            lines.append(f"  {name:32} {score:7.2%}   {chance:7.2%}")
    heading = "; on unseen images, beside chance:" if lines else ""
    print("\n".join([f"finished after {results['step']} steps{heading}", *lines]))
    page = workdir / "report" / "index.html"
    if page.exists():
        print(f"report: {page}")
