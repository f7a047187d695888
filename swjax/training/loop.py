"""The only training loop: CLIP with a config's recipe, optimizer and data, on one device or many.

Read `train` from top to bottom. A run is a directory:
config.json  config_history.jsonl  env.txt  metrics.jsonl  skipped.log  tensorboard/  results.json
checkpoints/<step>/  profile/  report/
"""

from contextlib import ExitStack, closing
from pathlib import Path

import jax
from ml_collections import ConfigDict

from swjax import data
from swjax.training import distributed
from swjax.training.evaluation import Evaluator, Validation, evaluate_unseen
from swjax.training.faults.errors import ExitCode
from swjax.training.faults.failures import blame_data, blame_disk
from swjax.training.faults.interrupt import Interrupt, catch
from swjax.training.faults.nan_policy import Action, NanPolicy
from swjax.training.inputs import Feed, check_pictures, fingerprints, open_splits
from swjax.training.log.console import Console
from swjax.training.log.results import is_finished, record_setup, tell_results, write_results
from swjax.training.log.step_log import StepLog
from swjax.training.log.timing import Timing, is_due
from swjax.training.setup import assemble, check_command, settle_recipe, use_compilation_cache
from swjax.training.state.checkpoint import Checkpoints, check_shared, lock_workdir
from swjax.training.state.mirror import Mirror
from swjax.training.state.model_of_weights import keep_tokenizer, settle_model
from swjax.training.state.restore import finished_steps, init_or_restore


def train_and_evaluate(config: ConfigDict, workdir: str | Path) -> int:
    """Trains, evaluates and reports one run, or resumes an interrupted one.

    Args:
      config: every key of configs/common.py.
      workdir: directory of the run; created. A leading ~ is the home directory.

    Returns:
      The exit code: 0 finished, or saved and interrupted; 1 diverged; 3 saved, because the output failed.

    Raises:
      ConfigError: a mistake in the config, in one line.
      RunError: the disk or another process failed, in one line.
    """
    distributed.start()
    distributed.check_same_start(config)
    check_command(config)
    use_compilation_cache(config)
    workdir = Path(workdir).expanduser()
    mirror = Mirror(config.checkpoint.mirror, workdir)
    suffix = "" if distributed.is_first() else f".{jax.process_index()}"
    bad_examples = data.log_to(workdir / f"skipped{suffix}.log")
    with ExitStack() as stack:
        stack.enter_context(blame_disk(workdir))
        stack.enter_context(distributed.blame_peers())
        distributed.first_does(lambda: stack.enter_context(lock_workdir(workdir)))
        check_shared(workdir)
        distributed.first_does(mirror.fetch)
        config = settle_recipe(settle_model(config, workdir), workdir)
        config = keep_tokenizer(config, workdir)
        interrupt = stack.enter_context(catch())
        stack.enter_context(bad_examples)
        stack.enter_context(blame_data())
        finished = is_finished(config, workdir)
        code = ExitCode.FINISHED if finished else train(config, workdir, interrupt, mirror)
        if not code and interrupt.output_failed:
            code = ExitCode.FAILED
        distributed.first_does(mirror.push)
        if not code and distributed.is_first() and (workdir / "results.json").exists():
            tell_results(workdir, has_report=config.report.enabled)
        return code


def train(config: ConfigDict, workdir: Path, interrupt: Interrupt, mirror: Mirror) -> ExitCode:
    """Trains to the last step, or until a signal sets `interrupt.requested`; see `train_and_evaluate`."""
    # -------------------------------------------------------------------------------- Set up
    splits = open_splits(config)
    parts, prints = assemble(config, splits["train"]), fingerprints(splits)
    train_step, evaluate = parts.train_step(config), Evaluator(config, parts.graphdef, parts.mesh)
    pictures = check_pictures(config, splits) + check_pictures(config, evaluate.sets)

    with ExitStack() as stack:
        opened = lambda part: stack.enter_context(closing(part))
        # ---------------------------------------------------------------------------- Restore
        checkpoints = opened(Checkpoints(workdir, keep=config.checkpoint.keep))
        state, position = init_or_restore(config, checkpoints, parts.init, parts.like, mirror)
        step, stopping = finished_steps(state, parts.steps), False
        console = Console(parts.steps)
        for line in pictures:
            console.say(line)
        timing = opened(Timing(config.train.batch_size, parts.model))
        feed = opened(Feed(config, parts, prints, position, timing))
        distributed.first_does(lambda: record_setup(config, workdir, console, step))
        policy = NanPolicy(config, steps=parts.steps, position=position, console=console)
        # A rollback needs a checkpoint, and so does a run whose state comes from `checkpoint.resume`.
        if (policy.rolls_back or step) and checkpoints.latest_step() is None:
            checkpoints.save(step, state, feed.position() | policy.position())
        log = opened(StepLog(config, workdir, parts, step, feed, timing, console))
        validation = Validation(config, parts.steps, evaluate, log, timing, position)
        validation.resume(step, state)
        while step < parts.steps and not stopping:
            # ------------------------------------------------------------------------ Step
            batch = next(feed, None)  # None: the data of a process failed; all save and end
            if batch:
                log.before(step + 1, state, batch)
                state, metrics = train_step(state, batch)
                step += 1
                log.add(step, metrics, saving=checkpoints.is_saving())
                interrupt.handle()

            # ------------------------------------------------------------------------ Log
            stopping = batch is None or distributed.should_stop(step, interrupt.requested)
            evaluating = batch is not None and validation.is_due(step)
            saving = stopping or step == parts.steps or is_due(step, config.checkpoint.every_steps)
            records = log.due(step, now=evaluating or saving)
            if not records and not stopping:
                continue
            checkpoints.check()
            mirror.update(console.say)
            action = policy.decide(records)
            if action is Action.ROLL_BACK:
                state, step = policy.roll_back(checkpoints, parts.like, log)
                continue
            validation.write(records, wait=evaluating and action is Action.GO_ON)
            if action is Action.STOP:
                console.say(policy.reason)
                return ExitCode.DIVERGED

            # ------------------------------------------------------------------------ Save
            if saving:  # first, because an evaluation may fail, or be killed
                position = feed.position() | policy.position() | validation.position()
                checkpoints.save(step, state, position)
                policy.reset_rollbacks()
                timing.lap("saving")

            # ------------------------------------------------------------------------ Evaluate
            if not stopping:  # otherwise the same command evaluates
                validation.score(state)
        # After a signal in the last save or evaluation, JAX stops all processes at the next step number.
        stopping = stopping or distributed.should_stop(step + 1, interrupt.requested)
    # -------------------------------------------------------------------------------- Report
    if stopping:
        console.say(f"interrupted: step {step} is saved in {workdir}; the same command resumes it")
        feed.check()
    else:
        unseen = evaluate_unseen(evaluate, state)
        distributed.first_does(
            lambda: write_results(config, workdir, parts, unseen, step=step, skipped=policy.skipped)
        )
    return ExitCode.FINISHED
