"""Describes a run before it starts: `python train.py --config=... --plan --hardware=h200:8`.

The plan trains nothing and needs no GPU. `swjax.tools.memory_model` predicts the memory; recorded rates
predict the time.
"""

import contextlib
import dataclasses
import math
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from ml_collections import ConfigDict

from swjax.data.batches import check_batch_size
from swjax.data.examples import look
from swjax.data.skipping import Skips
from swjax.fitting import Fitting
from swjax.kernels import chips
from swjax.kernels.targets import compiling_for
from swjax.models import clip, sharding
from swjax.models.config import CLIPConfig
from swjax.tools.memory_model import GIB, Memory, Mesh, most_pairs, predict
from swjax.training import config as config_lib
from swjax.training.config import ConfigError, blame
from swjax.training.evaluation import open_labelled
from swjax.training.faults.failures import blame_data
from swjax.training.inputs import check_pictures, open_splits
from swjax.training.optimizer import make_optimizer, make_schedule, split_frozen
from swjax.training.setup import (
    check_tokenizer,
    make_init,
    model_config,
    model_title,
    require_profile,
)
from swjax.training.state.checkpoint import require_checkpoint
from swjax.training.state.initialization import check_parameters
from swjax.training.state.mirror import Mirror
from swjax.training.state.model_of_weights import settle_model

# Training throughput in images per second on one GPU, at 224 pixels, with half of the patches dropped:
# (no block recomputed, all blocks recomputed). These are the newest rows of train_step_matrix_h200.json,
# train_step_h200.json and train_step_h100.json in benchmarks/results. None was not measured.
RATES: dict[str, dict[tuple[str, str], tuple[int, int | None]]] = {
    "h200": {
        ("vit_h14", "standard"): (805, 576),
        ("vit_h14", "switchback"): (1015, 781),
        ("vit_h14", "switchback_hadamard"): (1029, None),
        ("vit_h14", "fp8_switchback"): (900, 765),
        ("vit_l14", "standard"): (1704, 1261),
        ("vit_l14", "switchback"): (2111, 1682),
        ("vit_l14", "switchback_hadamard"): (2057, None),
        ("vit_l14", "fp8_switchback"): (1936, 1643),
        ("vit_b16", "standard"): (5621, 3903),
        ("vit_b16", "switchback"): (6538, 4808),
        ("vit_b16", "switchback_hadamard"): (5950, None),
        ("vit_b16", "fp8_switchback"): (5593, 4803),
        ("vit_b32", "standard"): (12960, 9229),
        ("vit_b32", "switchback"): (14950, 11640),
        ("vit_b32", "switchback_hadamard"): (13610, None),
        ("vit_b32", "fp8_switchback"): (13590, 11490),
    },
    "h100": {
        ("vit_h14", "standard"): (746, None),
        ("vit_h14", "switchback"): (904, None),
        ("vit_h14", "switchback_hadamard"): (890, None),
        ("vit_l14", "standard"): (1603, None),
        ("vit_l14", "switchback"): (1890, None),
        ("vit_l14", "switchback_hadamard"): (1761, None),
        ("vit_b16", "standard"): (4631, None),
        ("vit_b16", "switchback"): (4941, None),
        ("vit_b16", "switchback_hadamard"): (4632, None),
        ("vit_b32", "standard"): (11310, None),
        ("vit_b32", "switchback"): (12130, None),
        ("vit_b32", "switchback_hadamard"): (11130, None),
    },
}
# Relative throughput per device, on one host of four H200; that of H100s was not measured.
EFFICIENCY = {"one": 1.0, "fsdp": 0.95, "data": 0.93}
# Images per second of a loader process while all cores of its host load; JPEGs of 256 to 512 pixels,
# benchmarks/notes/data.md: 330 to 430 in training on 32-core Xeons. A process on an idle host loads 900.
IMAGES_PER_PROCESS = 350
DRAWN = ("emoji", "icons", "synthetic")  # data sets whose images need no decoding


class Hardware(NamedTuple):
    """The devices that a plan is for.

    Attributes:
      kind: a GPU of `swjax.kernels.chips`, with its size if there are several, as in "a100-40"; the memory of
        another device; or the kind of this machine's devices.
      devices: number of devices.
      limit: bytes that JAX may use on each device, or None if unknown.
      memory: GiB of each device, as its driver reports it, or None if unknown.
    """

    kind: str
    devices: int
    limit: float | None
    memory: float | None = None

    @classmethod
    def parse(cls, text: str) -> "Hardware":
        """Parses "KIND:COUNT" or "KIND"; "" means the devices of this machine.

        The kind is a GPU or a TPU, or the memory of any other device, such as "48GiB".

        Raises:
          ConfigError: the kind is unknown, or the count is not a positive number.

        >>> Hardware.parse("H100:8").kind, Hardware.parse("48GiB").limit / 2**30
        ('h100', 36.0)
        """
        if not text:
            device = jax.devices()[0]
            stats = (device.memory_stats() or {}) if device.platform == "gpu" else {}
            return cls(device.device_kind, jax.device_count(), stats.get("bytes_limit"))
        name, _, count = text.partition(":")
        size = re.fullmatch(r"(\d+(?:\.\d+)?)gib", name.lower())
        found = (name.lower(), float(size[1])) if size else _chip(name)
        if not found or not found[1]:
            known = ", ".join(_kind(chip, gib) for chip in chips.CHIPS for gib in chip.memory)
            raise ConfigError(
                f"--hardware={text} is unknown: choose from {known}, or write the memory of a device, such "
                "as 48GiB:8"
            )
        if not (count or "1").isdecimal() or int(count or 1) < 1:
            raise ConfigError(f"--hardware={text}: write KIND:COUNT, such as {name}:8")
        kind, gib = found
        share = 1 if kind.startswith("tpu") else fraction()
        return cls(kind, int(count or 1), share * gib * GIB, None if size else gib)


def _kind(chip: chips.Chip, gib: float) -> str:
    size = f"-{math.ceil(gib)}" * (len(chip.memory) > 1)
    return chip.name.lower().replace(" ", "") + size


def _chip(name: str) -> tuple[str, float] | None:
    """The kind and the GiB of a chip by one of its names; None if its memory is unknown.

    >>> _chip("A100"), _chip("4090"), _chip("h100-80"), _chip("h100-40"), _chip("v5e")
    (('a100-40', 39.4), ('rtx4090', 23.5), ('h100', 79.1), None, ('tpuv5e', 16.0))
    """
    model, _, size = name.partition("-")
    names = (model, f"rtx{model}", model.lower().removeprefix("tpu"))
    for chip in chips.CHIPS:
        own = chip.name.removeprefix("TPU ")
        named = own in names or any(re.fullmatch(chip.device_kind, each, re.I) for each in names)
        for gib in chip.memory if named else ():
            if size in ("", str(math.ceil(gib))):
                return _kind(chip, gib), gib
    return None


def fraction() -> float:
    """The fraction of a GPU's memory that JAX allocates."""
    # The second is the old name.
    names = "XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"
    return float(next(filter(None, map(os.environ.get, names)), "0.75"))


@dataclasses.dataclass(frozen=True)
class Plan:
    """The predicted properties of a run.

    Attributes:
      config: the config of the run.
      model: the model configuration.
      hardware: the devices that the plan is for.
      mesh: number of devices along each axis.
      params: ShapeDtypeStructs of the parameters of the model without LoRA.
      trained: number of trained parameters.
      state_bytes: bytes of the train state, which are also the bytes of a checkpoint.
      gradient_bytes: bytes of the gradients of the trained parameters.
      steps, warmup: number of steps of the run and of its warm-up.
      examples: number of examples of the data set.
      shown: the first captions.
      pictures: lines about unusable examples.
    """

    config: ConfigDict
    model: CLIPConfig
    hardware: Hardware
    mesh: Mesh
    params: Any
    trained: int
    state_bytes: int
    gradient_bytes: int
    steps: int
    warmup: int
    examples: int
    shown: tuple[str, ...]
    pictures: tuple[str, ...]

    @property
    def parameters(self) -> int:
        """Number of parameters of the model without LoRA."""
        return _size(self.params)

    @property
    def pairs(self) -> int:
        """Pairs per device and micro-batch."""
        return self.config.train.batch_size // self.mesh.shards // self.config.train.accumulation

    @property
    def memory(self) -> Memory:
        """Memory of one device at the peak of a step."""
        return predict(self.model, self.state_bytes, self.pairs, self.mesh, **_options(self))

    @property
    def fits(self) -> bool:
        return self.hardware.limit is None or self.memory.total <= self.hardware.limit


def make(config: ConfigDict, hardware: Hardware) -> Plan:
    """Opens the data, reads some of it and computes the plan.

    Raises:
      ConfigError: the config does not fit the data or the devices, or the profile does not fit the run; or
        too much of the data cannot be read.
    """
    with blame("mesh"):
        sizes = sharding.mesh_sizes(hardware.devices, **config.mesh)
    mesh = Mesh(*sizes)
    config_lib.validate(config, batch_shards=mesh.shards)
    config = settle_model(config, Path("none"))
    chip = chips.find(hardware.kind)
    with compiling_for(chip.name) if chip else contextlib.nullcontext():
        model = model_config(config)
    splits = open_splits(config)
    source = splits["train"]
    with blame_data():  # as at the start of a run
        skips = Skips(config.data.on_bad, config.data.max_bad_share)
        skips.damage(getattr(source, "damage", ()), getattr(source, "damaged_share", 0.0))
    counted = {"batch_size": config.train.batch_size, "dataset_size": len(source)}
    steps = config_lib.steps(config.train, "", **counted)
    warmup = config_lib.steps(config.schedule, "warmup_", **counted)
    optimizer = make_optimizer(config, make_schedule(config, steps, warmup))
    init, _ = make_init(config, model, optimizer)
    require_profile(config, steps)
    state = jax.eval_shape(init)
    state_bytes = _bytes(state)
    trained, _ = split_frozen(state["params"], config.optimizer.freeze)
    return Plan(
        config=config,
        model=model,
        hardware=hardware,
        mesh=mesh,
        params=jax.eval_shape(init.params),
        trained=_size(trained),
        state_bytes=state_bytes,
        gradient_bytes=_bytes(trained),
        steps=steps,
        warmup=warmup,
        examples=len(source),
        shown=_captions(source),
        pictures=tuple(check_pictures(config, splits)),
    )


def _captions(source: Any) -> tuple[str, ...]:
    """Up to two captions of the first usable one of 10 examples."""
    for index in range(min(10, len(source))):
        try:
            return tuple(look(source, index)[0]["captions"][:2])
        except Exception:  # `check_pictures` names the reason
            continue
    return ()


def require_openable(plan: Plan) -> None:
    """Checks what else a run opens at its start.

    Raises:
      ConfigError: a set of `eval.zeroshot` or another run does not exist, too much of a set cannot be read,
        weights do not fit the model, or an address has an unknown protocol.
    """
    for line in check_pictures(plan.config, open_labelled(plan.config)):
        print(_line("pictures", line))
    tokenizer = plan.config.data.tokenizer
    if tokenizer and not Path(tokenizer).exists():
        print(_line("tokenizer", f"training needs {tokenizer}, which is not on this machine"))
    else:
        check_tokenizer(plan.config, plan.model)
    c = plan.config.checkpoint
    if c.resume:
        require_checkpoint("checkpoint.resume", c.resume)
    Mirror(c.mirror, Path("none"))
    if c.init_from:
        check_parameters(c.init_from, dataclasses.replace(plan.model, lora=None), plan.params)


def lines(plan: Plan) -> Iterator[str]:
    """Formats the plan, one line per subject."""
    c, mesh, hardware = plan.config, plan.mesh, plan.hardware
    yield f"plan for {hardware.devices} x {hardware.kind}" + _limit(hardware)
    yield _line(
        "model",
        f"{model_title(c)}, {plan.parameters:,} parameters, "
        + f"{plan.trained:,} trained, " * (plan.trained != plan.parameters)
        + f"LoRA of rank {c.optimizer.lora.rank}, " * (c.optimizer.lora.rank > 0)
        + f"{plan.model.recipe}, {c.model.dtype}, remat={c.model.remat}",
    )
    captions = ", ".join(repr(caption[:60]) for caption in plan.shown)
    yield _line("data", f"{c.data.name}: {plan.examples:,} pairs; the first captions: {captions}")
    for line in plan.pictures:
        yield _line("pictures", line)
    pairs = plan.steps * c.train.batch_size
    yield _line(
        "length",
        f"{plan.steps:,} steps of {c.train.batch_size:,} pairs: {pairs:,} pairs, "
        f"{pairs / max(plan.examples, 1):.1f} epochs",
    )
    yield _line("learning rate", ", ".join(_rates(plan)))
    yield _line(
        "devices",
        f"data={mesh.data} fsdp={mesh.fsdp} tensor={mesh.tensor}; {plan.pairs:,} pairs per device "
        f"at a time, accumulation={c.train.accumulation}",
    )
    m = plan.memory
    yield _line(
        "memory",
        f"{_gib(m.total)} per device: train state {_gib(m.state)}, weights and gradients "
        f"{_gib(m.weights)}, activations {_gib(m.activations)} ({_gib(m.activations / plan.pairs)} "
        f"per pair)" + f", block at work {_gib(m.working)}" * (m.working > 0),
    )
    if hardware.limit is not None:
        for remat in _remats(plan):
            most = _most(plan, remat)
            needed = _accumulation(plan, remat)
            advice = f"accumulation={needed}" if needed else "no accumulation fits this batch"
            yield _line(f"  remat={remat}", f"up to {most:,} pairs per device at a time; {advice}")
    checkpoints = c.checkpoint.keep + 1
    yield _line(
        "checkpoints",
        f"{_gib(plan.state_bytes)} each, up to {checkpoints} at a time: "
        f"{_gib(checkpoints * plan.state_bytes)}",
    )
    yield from _time(plan)


def check(plan: Plan) -> None:
    """Raises a ConfigError with the nearest settings that fit, if the plan does not fit into memory."""
    if plan.fits:
        return
    remat = plan.config.model.remat
    remedies = []
    if plan.config.train.concurrent_kernels:
        options = _options(plan) | {"concurrent": False}
        less = predict(plan.model, plan.state_bytes, plan.pairs, plan.mesh, **options)
        if less.total <= (plan.hardware.limit or 0):
            remedies.append("--config.train.concurrent_kernels=False")
    for other in dict.fromkeys((remat, _remats(plan)[-1])):
        needed = _accumulation(plan, other)
        if needed:
            flags = f"--config.train.accumulation={needed}"
            remedies.append(flags + (f" --config.model.remat={other}" if other != remat else ""))
    assert plan.hardware.limit is not None, "a plan without a limit always fits"
    raise ConfigError(
        f"{plan.pairs:,} pairs per device need {_gib(plan.memory.total)}, and JAX has "
        f"{_gib(plan.hardware.limit)} of this {plan.hardware.kind}: "
        + (f"set {', or '.join(remedies)}" if remedies else "use more devices with fsdp")
    )


def _limit(hardware: Hardware) -> str:
    if hardware.limit is None:
        return "; its memory is unknown: name a GPU or TPU with --hardware"
    if hardware.memory is None:
        return f", {_gib(hardware.limit)} each for JAX"
    if hardware.kind.startswith("tpu"):
        return f", {hardware.memory:.1f} GiB each; the prediction was compared with GPUs only"
    return (
        f", {hardware.memory:.1f} GiB each; JAX takes {_gib(hardware.limit)} "
        f"(XLA_CLIENT_MEM_FRACTION={fraction():g})"
    )


def _rates(plan: Plan) -> Iterator[str]:
    schedule = make_schedule(plan.config, plan.steps, plan.warmup)
    at = {0, plan.warmup, plan.steps // 4, plan.steps // 2, plan.steps * 3 // 4, plan.steps - 1}
    for step in sorted(at):
        yield f"{float(schedule(step)):.2g} at {step:,}"


def _remats(plan: Plan) -> tuple[str, ...]:
    """The values of `model.remat` to advise; concurrent kernels allow no other than "none"."""
    return _REMATS[:1] if plan.config.train.concurrent_kernels else _REMATS


def _options(plan: Plan) -> dict[str, Any]:
    """The options of `predict` for the plan."""
    train = plan.config.train
    return {
        "accumulation": train.accumulation,
        "gradient_bytes": plan.gradient_bytes,
        "concurrent": train.concurrent_kernels,
    }


def _most(plan: Plan, remat: str) -> int:
    assert plan.hardware.limit is not None, "callers check the limit"
    model = dataclasses.replace(plan.model, remat=remat)
    return most_pairs(model, plan.state_bytes, plan.hardware.limit, plan.mesh, **_options(plan))


def _accumulation(plan: Plan, remat: str) -> int:
    """The smallest number of micro-batches that fits; 0 if none fits."""
    assert plan.hardware.limit is not None, "callers check the limit"
    model = dataclasses.replace(plan.model, remat=remat)
    whole = plan.config.train.batch_size // plan.mesh.shards
    for count in range(1, whole + 1):
        if whole % count:
            continue
        options = _options(plan) | {"accumulation": count}
        need = predict(model, plan.state_bytes, whole // count, plan.mesh, **options)
        if need.total <= plan.hardware.limit:
            return count
    return 0


def _time(plan: Plan) -> Iterator[str]:
    """The predicted time from the recorded rate of this model, recipe and GPU, and the loader processes."""
    c = plan.config
    rates = RATES.get(plan.hardware.kind, {}).get((c.model.name, str(plan.model.recipe)))
    usual = rates is not None and c.model.remat in _REMATS and _is_preset(plan)
    rate = rates[_REMATS.index(c.model.remat)] if rates and usual else None
    changed = c.train.concurrent_kernels or c.optimizer.name == "muon"
    if rate is None or changed:
        yield _line("time", "not measured for this model, recipe, remat, optimizer and hardware")
        return
    kind = "one" if plan.hardware.devices == 1 else "fsdp" if plan.mesh.fsdp > 1 else "data"
    total = rate * plan.hardware.devices * EFFICIENCY[kind]
    seconds = plan.steps * c.train.batch_size / total
    extrapolated = ""
    if plan.hardware.kind != "h200" and plan.hardware.devices > 1:
        extrapolated = " (extrapolated from one GPU with the scaling of four H200)"
    elif plan.hardware.devices > 4:
        extrapolated = " (extrapolated from 4 GPUs)"
    yield _line(
        "time",
        f"{total:,.0f} pairs per second{extrapolated}: {seconds / 3600:.1f} hours, without evaluation"
        + ", and without the second forward pass of accumulation" * (c.train.accumulation > 1),
    )
    if c.data.name not in DRAWN:
        processes = int(np.ceil(total / IMAGES_PER_PROCESS))
        yield _line(
            "loader",
            f"{processes} processes over all hosts (data.workers={c.data.workers} on each), for JPEGs "
            "of 256 to 512 pixels",
        )


_REMATS = ("none", "full")


def _is_preset(plan: Plan) -> bool:
    """Whether the model computes what the model of its name does, with half of the patches dropped."""
    model = plan.model
    names = ("recipe", "remat", "embed_dim", "init_logit_scale", "init_logit_bias")
    preset = clip.CONFIGS[plan.config.model.name]
    vision = dataclasses.asdict(Fitting.of(model.vision)) | {"image_size": 224}
    same = {name: getattr(model, name) for name in names}
    return model == clip.config(preset, patch_dropout=0.5, vision=vision, **same)


def _size(tree: Any) -> int:
    return sum(x.size for x in jax.tree.leaves(tree))


def _bytes(tree: Any) -> int:
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))


def _gib(size: float) -> str:
    if size >= 0.95 * GIB:
        return f"{size / GIB:.1f} GiB"
    mib = size / 2**20
    return f"{mib:.0f} MiB" if mib >= 9.5 else f"{mib:.1f} MiB"


def _line(subject: str, text: str) -> str:
    return f"{subject:<15}{text}"


def show(config: ConfigDict, hardware: str) -> int:
    """Prints the plan of a run and returns exit code 0.

    Raises:
      ConfigError: the config has a mistake; or, after the plan is printed, the run does not fit into memory,
        its batch is larger than the data set, or see `require_openable`.
    """
    plan = make(config, Hardware.parse(hardware))
    for line in lines(plan):
        print(line)
    with blame("data"):
        check_batch_size(config.train.batch_size, plan.examples)
    require_openable(plan)
    check(plan)
    return 0


__all__ = ["RATES", "Hardware", "Plan", "check", "lines", "make", "show"]
