"""timm's and open_clip's CLIP under torch.compile in bf16, for comparison; run by train_step.py --peers.

    python benchmarks/train_step_torch.py '{"kind": "step", "model": "vit_h14", "remat": "none", "batch": 64}'

prints a line of JSON for each case and mode of torch.compile. "modes" in a case lists the modes; the default
is ["default"]. "reduce-overhead" replays CUDA graphs; "max-autotune" also tunes products. With "turn": FILE
in a case it compiles, creates FILE.compiled, and measures when there is FILE. With "torchao": true, timm's
tower also runs with the linear layers of its blocks in torchao's int8 and float8, as its documentation
describes: all three products, bf16 parameters. A library that is not installed or fails gives a row with the
error. Times come from CUDA events: the median of REPEATS measurements of STEPS steps each.
"""

import itertools
import json
import statistics
import sys
import time
from functools import partial
from pathlib import Path

TIMM = {
    "vit_h14": "vit_huge_patch14_clip_224",
    "vit_l14": "vit_large_patch14_clip_224",
    "vit_b16": "vit_base_patch16_clip_224",
    "vit_b32": "vit_base_patch32_clip_224",
}
OPEN_CLIP = {
    "vit_h14": "ViT-H-14",
    "vit_l14": "ViT-L-14",
    "vit_b16": "ViT-B-16",
    "vit_b32": "ViT-B-32",
}
REPEATS, STEPS = 3, 20
EMBED = {"vit_h14": 1024, "vit_l14": 768, "vit_b16": 512, "vit_b32": 512}


def main(cases: list[str]) -> int:
    for case in map(json.loads, cases):
        torchao, modes = case.pop("torchao", False), case.pop("modes", ["default"])
        wait = partial(wait_for, case.pop("turn", None))
        runs = {"encoder": {"timm": encoder}, "step": {"open_clip": step}}[case["kind"]]
        if torchao and case["kind"] == "encoder":
            runs |= {f"timm torchao {name}": partial(encoder, convert=convert)
                     for name, convert in TORCHAO.items()}  # fmt: skip
        for (name, run), mode in itertools.product(runs.items(), modes):
            compiled = "torch.compile" if mode == "default" else f"torch.compile {mode}"
            row = case | {"implementation": f"{name} {compiled}", "is_peer": True}
            try:
                row |= run(case["model"], case["remat"] == "full", case["batch"], mode, wait)
            except Exception as error:  # a failing case must not end the run
                row["error"] = f"{type(error).__name__}: {str(error)[:300]}"
            print(json.dumps(row), flush=True)
    return 0


def encoder(name: str, remat: bool, batch: int, mode: str, wait, convert=None) -> dict:
    """Times timm's tower: fp32 parameters under autocast, or bf16 parameters with `convert`ed layers."""
    import timm
    import torch

    model = timm.create_model(TIMM[name], num_classes=EMBED[name]).cuda().train()
    model.set_grad_checkpointing(remat)
    images = torch.randn(batch, 3, 224, 224, device="cuda")
    if convert:
        model, images = model.bfloat16(), images.bfloat16()
        convert(model)
    compiled = torch.compile(model, mode=mode)
    g = torch.randn(batch, EMBED[name], device="cuda")

    def run():
        torch.compiler.cudagraph_mark_step_begin()
        with torch.autocast("cuda", torch.bfloat16, enabled=not convert):
            y = compiled(images)
        torch.sum(y.float() * g).backward()
        model.zero_grad(set_to_none=True)

    return measure(torch, run, batch, wait)


def to_int8(model):
    from torchao import quantize_
    from torchao.prototype.quantized_training import int8_mixed_precision_training

    quantize_(model, int8_mixed_precision_training(), filter_fn=in_blocks)


def to_float8(model):
    from torchao.float8 import convert_to_float8_training

    convert_to_float8_training(model, module_filter_fn=in_blocks)


def in_blocks(module, path: str) -> bool:
    """Whether a module is one of the layers that swjax's recipes quantize."""
    return type(module).__name__ == "Linear" and path.startswith("blocks.")


TORCHAO = {"int8": to_int8, "float8": to_float8}


def step(name: str, remat: bool, batch: int, mode: str, wait) -> dict:
    import open_clip
    import torch

    model = open_clip.create_model(OPEN_CLIP[name], force_patch_dropout=0.5).cuda().train()
    model.set_grad_checkpointing(remat)
    compiled = torch.compile(model, mode=mode)
    loss = open_clip.ClipLoss()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.2, fused=True)
    images = torch.randn(batch, 3, 224, 224, device="cuda")
    text = torch.randint(1, 1000, (batch, 77), device="cuda")

    def run():
        torch.compiler.cudagraph_mark_step_begin()
        with torch.autocast("cuda", torch.bfloat16):
            image, caption, scale = compiled(images, text)
            total = loss(image, caption, scale)
        total.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return measure(torch, run, batch, wait)


def measure(torch, run, batch: int, wait) -> dict:
    began = time.perf_counter()
    for _ in range(3):
        run()
    torch.cuda.synchronize()
    compiling = time.perf_counter() - began
    wait()
    torch.cuda.reset_peak_memory_stats()
    repeats = [milliseconds(torch, run) for _ in range(REPEATS)]
    ms = statistics.median(repeats)
    memory = torch.cuda.max_memory_allocated() / 2**30
    return {
        "ms": ms,
        "ms_of_repeats": [round(each, 2) for each in repeats],
        "images_per_second": 1e3 * batch / ms,
        "memory_gib": memory,
        "compile_seconds": round(compiling),
    }


def wait_for(turn: str | None) -> None:
    """Does what `timing.wait_for` does, without JAX, which this process cannot import."""
    if turn:
        Path(f"{turn}.compiled").touch()
        while not Path(turn).exists():
            time.sleep(0.1)


def milliseconds(torch, run) -> float:
    """Milliseconds of a step, over consecutive steps."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(STEPS):
        run()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / STEPS


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
