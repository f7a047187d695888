"""`train.profile_steps`: traces some steps of a run and summarizes the trace."""

from contextlib import ExitStack
from pathlib import Path

import jax
from ml_collections import ConfigDict

from swjax.diagnostics.device_time import device_time, read_trace
from swjax.safe_files import write_atomically
from swjax.training import distributed
from swjax.training.log.console import Console, device_memory
from swjax.training.log.timing import Timing
from swjax.training.step import State


class Profiler:
    """Traces the steps of `config.train.profile_steps` in process 0, and summarizes the device time.

    WORKDIR/profile receives the trace of `jax.profiler`, memory.prof (device memory after the last traced
    step, in pprof's format) and summary.txt. The first step of a process compiles, so it is not traced.

    Args:
      config: the config of the run.
      workdir: directory of the run.
      step: the last step that an earlier process has finished; 0 at the beginning.
      timing: clock of the run; throughput excludes the time of writing the trace.
      console: prints the summary.
    """

    def __init__(
        self, config: ConfigDict, workdir: Path, *, step: int, timing: Timing, console: Console
    ):
        self._folder = workdir / "profile"
        self._timing, self._console = timing, console
        self._mark = ExitStack()  # annotation of the current step in the trace
        self._steps: list[int] = []  # numbers of the traced steps
        self._left = range(0)
        if config.train.profile_steps and distributed.is_first():
            first, last = config.train.profile_steps
            self._left = range(max(first, step + 2), last + 1)
            if not self._left:
                console.say(
                    f"config.train.profile_steps={first},{last}: no trace, because this process starts with "
                    f"step {step + 1}, which compiles"
                )

    def begin(self, step: int, state: State) -> None:
        """Starts or stops the trace if it is due. The loop calls this before each step.

        Args:
          step: number of the next step.
          state: the train state; the trace starts and stops once the device has computed it.
        """
        if self._steps and step not in self._left:
            self._wait(state)
            self.close()
        if step not in self._left:
            return
        if not self._steps:
            self._wait(state)
            options = jax.profiler.ProfileOptions()
            options.python_tracer_level = 0  # tracing Python calls would slow the steps
            self._folder.mkdir(exist_ok=True)
            jax.profiler.start_trace(str(self._folder), profiler_options=options)
            self._timing.lap("profile")
        self._mark.close()
        self._mark.enter_context(jax.profiler.StepTraceAnnotation("train", step_num=step))
        self._steps.append(step)

    def _wait(self, state: State) -> None:
        """Waits for the steps in flight, whose time counts as training."""
        jax.block_until_ready(state)
        self._timing.lap("device")

    def close(self) -> None:
        """Stops a running trace and writes its summary."""
        if not self._steps:
            return
        self._mark.close()
        jax.profiler.save_device_memory_profile(str(self._folder / "memory.prof"))
        jax.profiler.stop_trace()
        summary = self._summary()
        write_atomically(self._folder / "summary.txt", summary + "\n")
        self._console.say(summary)
        self._steps, self._left = [], range(0)
        self._timing.lap("profile")

    def _summary(self) -> str:
        first, last = self._steps[0], self._steps[-1]
        steps = f"step {first}" if first == last else f"steps {first} to {last}"
        devices = read_trace(self._folder)
        if not devices:
            return f"profile of {steps}: the trace in {self._folder} has no device times"
        time = device_time(devices, len(self._steps))
        lines = [
            f"profile of {steps}, mean of {time.devices} x {jax.devices()[0].device_kind}; "
            f"trace: {self._folder}",
            time.table(),
        ]
        if jax.default_backend() == "cpu":
            lines.append(
                "(on CPUs XLA names a fusion after few of its operations: products may count as other)"
            )
        if memory := device_memory():
            lines.append(f"memory: {memory}")
        return "\n".join(lines)
