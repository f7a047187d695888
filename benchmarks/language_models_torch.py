"""Times the models of language_models.py in PyTorch under torch.compile: bf16, torchao's float8 and int8.

    python benchmarks/language_models_torch.py --out=benchmarks/results/language_models_torch.json
    python benchmarks/language_models_torch.py --kinds blocks --arms bf16 float8_tensorwise
    python benchmarks/language_models_torch.py --kinds step --mesh fsdp=1 fsdp=2     # two GPUs
    python benchmarks/language_models_torch.py --models tiny --arms bf16      # on any machine

It has a process and an environment of its own, because PyTorch needs another Triton than swjax's kernels.
Blocks have bf16 parameters. Whole steps have fp32 parameters under autocast and the fused AdamW, as swjax's
have fp32 parameters; the head and its loss run in chunks with bf16 logits. "int8" is torchao's int8
mixed-precision training with all three products in int8; "int8_wgrad16" has 16-bit weight gradients. With
--mesh, devices share a whole step by FSDP2, a process each: blocks are compiled and sharded one by one, as in
torchtitan, parameters are gathered in bfloat16, and those of "float8_tensorwise" in float8. Times are
wall-clock times over consecutive calls, the median of REPEATS; memory is PyTorch's peak on a device.
"""

import contextlib
import dataclasses
import datetime
import importlib.metadata
import json
import os
import shlex
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch
from torch import distributed, multiprocessing, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.language_models_shapes import (  # noqa: E402
    B2,
    EPSILON,
    LEARNING_RATE,
    ROPE_BASE,
    WEIGHT_DECAY,
    Shape,
    check_memory,
    chunk,
    parser,
    selected,
    with_kinds,
)

REPEATS = 3
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PACKAGES = ("torch", "torchao", "triton")


# --- the model -----------------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self, shape: Shape):
        super().__init__()
        if shape.experts:
            raise ValueError("this program has no experts: use benchmarks/kernels/experts_torch.py")
        linear = lambda rows, columns: nn.Linear(rows, columns, bias=False)
        width, hidden = shape.width, shape.hidden
        queries, keys = shape.heads * shape.head_width, shape.kv_heads * shape.head_width
        self.attention_norm, self.mlp_norm = (nn.RMSNorm(width, EPSILON) for _ in range(2))
        self.q_proj, self.o_proj = linear(width, queries), linear(queries, width)
        self.k_proj, self.v_proj = linear(width, keys), linear(width, keys)
        self.gate_proj, self.up_proj = linear(width, hidden), linear(width, hidden)
        self.down_proj = linear(hidden, width)
        norm = lambda: nn.RMSNorm(shape.head_width, EPSILON) if shape.qk_norm else nn.Identity()
        self.q_norm, self.k_norm = norm(), norm()
        self.head_width = shape.head_width

    def forward(self, x, rotation):
        y = self.attention_norm(x)
        x = x + self.o_proj(self.attend(self.q_proj(y), self.k_proj(y), self.v_proj(y), rotation))
        y = self.mlp_norm(x)
        return x + self.down_proj(functional.silu(self.gate_proj(y)) * self.up_proj(y))

    def attend(self, q, k, v, rotation):
        q, k, v = (y.unflatten(-1, (-1, self.head_width)).transpose(1, 2) for y in (q, k, v))
        q, k = self.q_norm(q).to(v.dtype), self.k_norm(k).to(v.dtype)
        if rotation is not None:
            q, k = rotate(q, *rotation), rotate(k, *rotation)
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return y.transpose(1, 2).flatten(2)


class Blocks(nn.Module):
    def __init__(self, shape: Shape, remat: bool):
        super().__init__()
        self.layers = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.remat = remat

    def forward(self, x, rotation=None):
        for layer in self.layers:
            if self.remat:
                x = checkpoint(layer, x, rotation, use_reentrant=False)
            else:
                x = layer(x, rotation)
        return x


class LanguageModel(nn.Module):
    """Embedding, blocks and norm: tokens [b, t] -> [b, t, width] in bfloat16. Its caller applies
    `head`, the weight [vocabulary, width] of the head.
    """

    def __init__(self, blocks: nn.Module, shape: Shape):
        super().__init__()
        self.embedding = nn.Embedding(shape.vocabulary, shape.width)
        nn.init.normal_(self.embedding.weight, std=shape.width**-0.5)
        self.blocks, self.norm = blocks, nn.RMSNorm(shape.width, EPSILON)
        untied = None if shape.tied else nn.Parameter(self.embedding.weight.detach().clone())
        self.head = self.embedding.weight if untied is None else untied
        frequencies = ROPE_BASE ** (-torch.arange(0, shape.head_width, 2) / shape.head_width)
        angles = torch.arange(shape.length)[:, None] * frequencies
        self.register_buffer("cosines", angles.cos())
        self.register_buffer("sines", angles.sin())

    def forward(self, tokens):
        x = self.embedding(tokens).bfloat16()
        return self.norm(self.blocks(x, (self.cosines, self.sines))).bfloat16()


class Loss(nn.Module):
    """A language model with its loss: tokens [b, t + 1] -> the mean loss of the next tokens."""

    def __init__(self, model: LanguageModel):
        super().__init__()
        self.model = model

    def forward(self, tokens):
        x = self.model(tokens[:, :-1])
        return LinearCrossEntropy.apply(x, self.model.head, tokens[:, 1:])


def rotate(x, cosines, sines):
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat((a * cosines - b * sines, b * cosines + a * sines), -1).to(x.dtype)


class LinearCrossEntropy(torch.autograd.Function):
    """The mean loss of a head; the forward pass computes the gradients in chunks, as swjax's does."""

    @staticmethod
    def forward(ctx, x, weight, labels):
        """x [b, t, d] in bfloat16, weight [v, d], labels [b, t]. Products are in bfloat16."""
        total, dx = torch.zeros((), device=x.device), torch.empty_like(x)
        dw = torch.zeros_like(weight, dtype=torch.float32)
        ctx.dtype, weight = weight.dtype, weight.to(x.dtype)
        positions = chunk(len(x))
        for start in range(0, x.shape[1], positions):
            part = slice(start, start + positions)
            rows = x[:, part].flatten(0, 1)
            loss, gradient = chunk_loss(rows @ weight.T, labels[:, part].flatten(), labels.numel())
            total += loss
            dx[:, part] = (gradient @ weight).view_as(x[:, part])
            dw += gradient.T @ rows
        ctx.save_for_backward(dx, dw)
        return total

    @staticmethod
    def backward(ctx, g):
        dx, dw = ctx.saved_tensors
        return g.to(dx.dtype) * dx, (g * dw).to(ctx.dtype), None


@torch.compile(dynamic=False)
def chunk_loss(logits, labels, count: int):
    """The sum of the losses over `count`, and its gradient by the logits, in their dtype."""
    exact = logits.float()
    lse = torch.logsumexp(exact, -1, keepdim=True)
    match = labels[:, None] == torch.arange(exact.shape[-1], device=exact.device)
    loss = (lse[:, 0] - torch.where(match, exact, 0.0).sum(-1)).sum() / count
    return loss, (((exact - lse).exp() - match.float()) / count).to(logits.dtype)


# --- arms: functions that convert blocks ----------------------------------------------------------------


def float8(recipe: str, blocks: nn.Module) -> nn.Module:
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config = Float8LinearConfig.from_recipe_name(recipe)
    if recipe == "tensorwise" and distributed.is_initialized():  # other recipes gather bfloat16
        config = dataclasses.replace(config, enable_fsdp_float8_all_gather=True)
    return convert_to_float8_training(blocks, config=config)


def int8(grad_weight: bool, blocks: nn.Module) -> nn.Module:
    from torchao import quantize_
    from torchao.prototype import quantized_training as training

    config = training.Int8MixedPrecisionTrainingConfig(
        output=True, grad_input=True, grad_weight=grad_weight
    )
    quantize_(blocks, training.int8_mixed_precision_training(config))
    return blocks


ARMS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "bf16": lambda blocks: blocks,
    "float8_tensorwise": lambda blocks: float8("tensorwise", blocks),
    "float8_rowwise": lambda blocks: float8("rowwise", blocks),
    "int8": lambda blocks: int8(True, blocks),
    "int8_wgrad16": lambda blocks: int8(False, blocks),
}


# --- the programs: each returns a function that runs it once -------------------------------------------


def run_blocks(arm: str, shape: Shape, remat: bool) -> Callable[[], None]:
    with torch.device(DEVICE):
        model = ARMS[arm](Blocks(shape, remat).bfloat16())
    compiled = torch.compile(model)
    size = (shape.batch, shape.length, shape.width)
    x, g = (torch.randn(size, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))
    x.requires_grad_()

    def run():
        x.grad = None
        model.zero_grad(set_to_none=True)
        compiled(x).backward(g)

    return run


def run_step(arm: str, shape: Shape, remat: bool) -> Callable[[], None]:
    with torch.device(DEVICE):
        model = LanguageModel(ARMS[arm](Blocks(shape, remat)), shape)
    optimizer = adamw(model)
    compiled = torch.compile(model)
    tokens = random_tokens(shape)

    def run():
        with torch.autocast(DEVICE, torch.bfloat16):
            x = compiled(tokens[:, :-1])
        loss = LinearCrossEntropy.apply(x, model.head, tokens[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return run


def run_sharded_step(arm: str, shape: Shape, remat: bool, reduce_dtype: str) -> Callable[[], None]:
    """`run_step` in one of the processes that share the step; the batch of `shape` is that of a process."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    with torch.device(DEVICE):
        model = Loss(LanguageModel(ARMS[arm](Blocks(shape, remat)), shape))
    # Rotary positions stay in float32; activations are in bfloat16 already.
    policy = MixedPrecisionPolicy(
        torch.bfloat16, getattr(torch, reduce_dtype), cast_forward_inputs=False
    )
    layers = model.model.blocks.layers
    for i, layer in enumerate(layers):
        layers[i] = fully_shard(torch.compile(layer), mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    optimizer, tokens = adamw(model), random_tokens(shape)

    def run():
        model(tokens).backward()
        optimizer.step()
        if arm == "float8_tensorwise":  # one all-reduce for the scales of all weights
            from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp

            precompute_float8_dynamic_scale_for_fsdp(model)
        optimizer.zero_grad(set_to_none=True)

    return run


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    options = {"lr": LEARNING_RATE, "betas": (0.9, B2), "weight_decay": WEIGHT_DECAY}
    return torch.optim.AdamW(model.parameters(), fused=True, **options)


def random_tokens(shape: Shape) -> torch.Tensor:
    size = (shape.batch, shape.length + 1)
    return torch.randint(0, shape.vocabulary, size, device=DEVICE)


# --- measuring -------------------------------------------------------------------------------------------


def main(argv: list[str] | None = None) -> int:
    args = with_kinds(parser(__doc__, ARMS), argv)
    result, deadline = machine() | {"rows": []}, time.time() + args.seconds

    def add(row: dict) -> None:
        result["rows"].append(row)
        print(json.dumps(row), flush=True)
        if args.out:
            args.out.parent.mkdir(parents=True, exist_ok=True)
            args.out.write_text(json.dumps(result, indent=1) + "\n")

    for devices in dict.fromkeys(args.mesh):
        cases = [case for case in selected(args) if case[3] == devices]
        if devices == 1:
            for case in cases:
                if time.time() < deadline:
                    add(row_of(case, args))
        else:
            for row in rows_of_processes(cases, args, devices, deadline):
                add(row)
    return 0


def row_of(case: tuple, args) -> dict:
    kind, model, arm, devices, shape = case
    row = {"kind": kind, "model": model, "arm": f"torch {arm}", "devices": devices}
    row |= {"layers": shape.layers, "remat": args.remat, "batch": shape.batch}
    row |= {"length": shape.length, "flops": shape.flops}
    row |= {"reduce_dtype": args.reduce_dtype} if devices > 1 else {}
    try:
        if DEVICE == "cuda":
            check_memory(shape, devices, torch.cuda.get_device_properties(0).total_memory)
        if devices > 1:
            own = shape._replace(batch=shape.batch // devices)
            prepare = partial(run_sharded_step, arm, own, args.remat, args.reduce_dtype)
        else:
            prepare = partial(
                {"blocks": run_blocks, "step": run_step}[kind], arm, shape, args.remat
            )
        return row | measure(prepare, shape, devices)
    except Exception as error:  # a failing case must not end the run
        return row | {"error": f"{type(error).__name__}: {str(error)[:300]}"}


# --- several processes -----------------------------------------------------------------------------------


def rows_of_processes(cases: list[tuple], args, devices: int, deadline: float) -> Iterator[dict]:
    """Yields the rows of all cases, which processes with a device each measure together."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    rows = multiprocessing.get_context("spawn").SimpleQueue()
    arguments, ended = (devices, port, cases, args, deadline, rows), False
    running = multiprocessing.spawn(process, arguments, nprocs=devices, join=False)
    while not ended:
        try:
            ended = running.join(timeout=1)
        except multiprocessing.ProcessException as error:
            print(error, file=sys.stderr)
            ended = True
        while not rows.empty():
            yield rows.get()


def process(rank: int, devices: int, port: int, cases, args, deadline: float, rows) -> None:
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(devices)}
    if DEVICE == "cuda":
        torch.cuda.set_device(rank)
    backend = "nccl" if DEVICE == "cuda" else "gloo"
    distributed.init_process_group(backend, timeout=datetime.timedelta(minutes=2))
    for case in cases:
        late = torch.tensor(float(time.time() > deadline), device=DEVICE)
        distributed.all_reduce(late)  # all stop at the same case
        if late:
            break
        row = row_of(case, args)
        if rank == 0:
            rows.put(row)
    distributed.destroy_process_group()


# --- times ------------------------------------------------------------------------------------------------


def measure(prepare: Callable, shape: Shape, devices: int) -> dict:
    torch._dynamo.reset()
    if DEVICE == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    began = time.perf_counter()
    run = prepare()
    for _ in range(3):
        run()
    synchronize()
    compile_seconds = time.perf_counter() - began
    # About a second at 500 TFLOP/s; all processes make the same number of calls.
    calls = max(3, min(10, round(5e14 * devices / shape.flops)))
    repeats = [seconds_per_call(run, calls) for _ in range(REPEATS)]
    seconds = statistics.median(repeats)
    row = {
        "ms": round(1e3 * seconds, 3),
        "ms_of_repeats": [round(1e3 * each, 2) for each in repeats],
        "tokens_per_second": round(shape.tokens / seconds),
        "tflops": round(shape.flops / devices / seconds / 1e12, 2),
        "compile_seconds": round(compile_seconds),
    }
    if DEVICE == "cuda":
        row["memory_gib"] = round(torch.cuda.max_memory_allocated() / 2**30, 2)
    return row


def seconds_per_call(run: Callable[[], None], calls: int) -> float:
    start = time.perf_counter()
    for _ in range(calls):
        run()
    synchronize()
    return (time.perf_counter() - start) / calls


def synchronize() -> None:
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def machine() -> dict:
    """Returns the device, command, date, commit and versions, as benchmarks/kernels/timing.py does."""
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=12"]
    commit = subprocess.run(command, capture_output=True, text=True).stdout.strip() or "unknown"
    arguments = [each.rpartition("/")[2] if "/" in each else each for each in sys.argv[1:]]
    return {
        "device": torch.cuda.get_device_name() if DEVICE == "cuda" else "cpu",
        "commit": commit,
        "command": shlex.join(["python", "benchmarks/language_models_torch.py", *arguments]),
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "versions": {name: version(name) for name in PACKAGES},
    }


def version(package: str) -> str | None:
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(package)
    return None


if __name__ == "__main__":
    sys.exit(main())
