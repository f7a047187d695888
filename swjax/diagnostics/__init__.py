"""Finds out why a run is unstable: metrics to record in any Flax project, loss spikes and their causes.

`norms`, `rms` or `adamw_rms` run on the device inside each training step. `measure` runs occasionally.
`Recorder` writes a file that `python -m swjax diagnostics report` reads. `Detector` finds events during a
run.
"""

from swjax.diagnostics.recorder import Packer, Recorder
from swjax.diagnostics.spikes import Detector, Rules, Watch, analyse
from swjax.diagnostics.taps import measure
from swjax.diagnostics.values import (
    NamedIndex,
    adamw_rms,
    feature_magnitude,
    first_nonfinite,
    logit_sharpness,
    norms,
    rms,
    squares,
)

__all__ = [
    "Detector",
    "NamedIndex",
    "Packer",
    "Recorder",
    "Rules",
    "Watch",
    "adamw_rms",
    "analyse",
    "feature_magnitude",
    "first_nonfinite",
    "logit_sharpness",
    "measure",
    "norms",
    "rms",
    "squares",
]
