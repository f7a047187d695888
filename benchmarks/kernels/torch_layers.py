"""Products and layers of PyTorch and its libraries, to compare; run by `benchmarks.kernels.bench --peers`.

    python benchmarks/kernels/torch_layers.py 65536,1280,5120 65536,5120,1280

prints one JSON row a line. CUDA events time consecutive calls, so gaps between kernels count if launches are
slower than kernels. A library that is not installed or fails gives a row with the error.
"""

import importlib
import json
import sys


def main(layers: list[str]):
    shapes = [tuple(map(int, layer.split(","))) for layer in layers]
    for run in (products, torch_layer, torchao_layer, transformer_engine_layer):
        try:
            torch = importlib.import_module("torch")
            if not torch.cuda.is_available():
                raise RuntimeError("torch finds no GPU")
            for tokens, k, n in shapes:
                shape = {"shape": f"{tokens}x{k}->{n}", "is_peer": True}
                for row in run(torch, tokens, k, n):
                    print(json.dumps(row | shape), flush=True)
        except Exception as error:  # a failing library must not end the run
            reason = f"{type(error).__name__}: {str(error)[:300]}"
            row = {"op": "torch", "shape": "", "dtype": "", "implementation": run.__name__}
            print(json.dumps(row | {"error": reason}), flush=True)


def products(torch, m, k, n):
    """Yields products x w without bias; fp8 has fast accumulation."""
    x = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
    w = torch.randn(n, k, device="cuda", dtype=torch.bfloat16)
    x8, w8 = (torch.randint(-127, 128, t.shape, device="cuda", dtype=torch.int8) for t in (x, w))
    xf, wf = x.to(torch.float8_e4m3fn), w.to(torch.float8_e4m3fn)
    rows = torch.rand(m, 1, device="cuda"), torch.rand(1, n, device="cuda")
    tensor = torch.rand((), device="cuda"), torch.rand((), device="cuda")

    def scaled(scales):
        return lambda: torch._scaled_mm(
            xf, wf.t(), *scales, out_dtype=torch.bfloat16, use_fast_accum=True
        )

    for name, dtype, function in (
        ("torch bf16", "bfloat16", lambda: x @ w.t()),
        ("torch._int_mm, s32 out", "int8", lambda: torch._int_mm(x8, w8.t())),
        ("torch._scaled_mm rows", "float8_e4m3fn", scaled(rows)),
        ("torch._scaled_mm tensor", "float8_e4m3fn", scaled(tensor)),
    ):
        row = {"op": "matmul", "implementation": name, "dtype": dtype}
        try:
            yield row | times(torch, function, 2 * m * k * n)
        except RuntimeError as error:
            yield row | {"error": str(error)[:300]}


def torch_layer(torch, m, k, n):
    """nn.Linear with fp32 parameters under autocast, eager and compiled."""
    layer = torch.nn.Linear(k, n, device="cuda")
    yield layer_row(torch, "torch autocast bf16", layer, m, k, n, autocast=True)
    compiled = torch.compile(layer)
    yield layer_row(torch, "torch autocast bf16, compiled", compiled, m, k, n, autocast=True)


def torchao_layer(torch, m, k, n):
    """int8 mixed-precision training, as its documentation says: bf16 parameters, compiled."""
    training = importlib.import_module("torchao.prototype.quantized_training")
    quantize = importlib.import_module("torchao").quantize_
    model = torch.nn.Sequential(torch.nn.Linear(k, n, device="cuda", dtype=torch.bfloat16))
    quantize(model, training.int8_mixed_precision_training())
    yield layer_row(torch, "torchao int8 mixed precision", torch.compile(model), m, k, n)


def transformer_engine_layer(torch, m, k, n):
    """te.Linear in fp8, all three products."""
    te = importlib.import_module("transformer_engine.pytorch")
    layer = te.Linear(k, n, params_dtype=torch.bfloat16, device="cuda")

    def run(x):
        with te.fp8_autocast(enabled=True):
            return layer(x)

    run.parameters = layer.parameters
    yield layer_row(torch, "Transformer Engine fp8", run, m, k, n)


def layer_row(torch, name, layer, m, k, n, autocast=False):
    x = torch.randn(m, k, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    g = torch.randn(m, n, device="cuda", dtype=torch.bfloat16)
    inputs = [x, *layer.parameters()]

    def step():
        with torch.autocast("cuda", dtype=torch.bfloat16, enabled=autocast):
            y = layer(x)
        return torch.autograd.grad(y, inputs, g)

    row = {"op": "layer plain", "implementation": name, "dtype": "bfloat16"}
    return row | times(torch, step, 6 * m * k * n)


def times(torch, function, arithmetic, warmup=4, iterations=20):
    for _ in range(warmup):
        function()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(iterations):
        function()
    end.record()
    end.synchronize()
    us = 1e3 * start.elapsed_time(end) / iterations
    return {"us": us, "tops": arithmetic / us / 1e6, "clock": "CUDA events"}


if __name__ == "__main__":
    main(sys.argv[1:])
