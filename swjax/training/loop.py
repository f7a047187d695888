"""The one training loop: CLIP with a config's recipe, optimizer and data, on one device or many.

Read `train` from top to bottom; what it calls stands below it, in that order. A run is a directory:
config.json  env.txt  metrics.jsonl  skipped.log  tensorboard/  checkpoints/<step>/  results.json
report/
"""

import gc
import math
from contextlib import ExitStack, closing
from pathlib import Path

import jax
import numpy as np

from swjax import data, report
from swjax.diagnostics import Packer, Rules, Watch
from swjax.models import clip, sharding
from swjax.training import distributed
from swjax.training.checkpoint import Checkpoints, check_shared, lock
from swjax.training.console import Console
from swjax.training.evaluation import PREDICTIONS, make_evaluate
from swjax.training.failures import blame_data, blame_disk
from swjax.training.health import Health
from swjax.training.inputs import make_gather, open_batches, open_source
from swjax.training.interrupt import catch
from swjax.training.metric_log import MetricLog
from swjax.training.results import is_finished, record_setup, tell_results, write_results
from swjax.training.setup import (
    check,
    compile_step,
    init_or_restore,
    make_init,
    plan,
    use_compilation_cache,
)
from swjax.training.step import make_train_step
from swjax.training.step_clock import StepClock
from swjax.training.throughput import Meter

MAX_ROLLBACKS = 3  # to one checkpoint


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
    console = Console(total)

    # ---------------------------------------------------------------------------------
    # State: from this workdir, from `resume`, from `init_from`, or from scratch
    # ---------------------------------------------------------------------------------
    init, graphdef = make_init(config, cfg, optimizer)
    like = sharding.abstract_state(jax.eval_shape(init), mesh)
    checkpoints = Checkpoints(workdir, keep=config.checkpoint.keep)
    state, position = init_or_restore(config, checkpoints, init, like)
    step = int(state["step"])
    distributed.first_does(lambda: record_setup(config, workdir, console, step))
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
                console.say(f"step {step} took {meter.restart():.0f} s, most of it compiling")
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
                console.say(
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
                console.say(f"{bad}: back to step {step}, past the data of these steps")
                clock.lap("rollback")
                continue
            clock.lap("log")
            if evaluating and not bad:
                records[-1] |= evaluate(state, "val")[0]
                meter.restart()  # throughput leaves it out
                clock.lap("evaluation")
            log.write([record | perf for record in records])
            for event in watch.update(records):
                console.say(event)
            console.update(records[-1] | perf)
            if bad:
                console.say(f"{bad}: stopped; config.train.nan_policy={config.train.nan_policy!r}")
                return 1
            clock.lap("log")
            if saving:
                checkpoints.save(step, state, batches.position(gather))
                rollbacks = 0
                clock.lap("saving")
    if step < total:
        console.say(f"interrupted: step {step} is saved in {workdir}; the same command goes on")
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
