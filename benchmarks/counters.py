"""Runs a Triton kernel in a program without JAX, because Nsight Compute cannot profile JAX programs.

  python benchmarks/counters.py --compile gelu matmul --out=FOLDER            # needs Triton, no GPU
  ncu --clock-control none --set full --launch-skip 2 --launch-count 1 \\
      python benchmarks/counters.py --launch FOLDER/gelu                      # needs CuPy and a Hopper GPU

The kernels have the arguments, tiles and options of the library's launches for 65,536 tokens of ViT-H/14.
"""

import argparse
import json
import os
import sys
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # leaves the GPU to the profiler

TOKENS, WIDTH = 65536, 1280
TYPES = {
    "bfloat16": "*bf16",
    "float16": "*fp16",
    "float32": "*fp32",
    "int8": "*i8",
    "float8_e4m3fn": "*fp8e4nv",
    "float8_e5m2": "*fp8e5",
}


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--compile", nargs="+", choices=CALLS, default=[])
    parser.add_argument("--out", type=Path, default=Path(), help="folder of what is compiled")
    parser.add_argument("--launch", type=Path, help="its name there, without an ending")
    args = parser.parse_args(argv)
    for name in args.compile:
        compile_kernel(name, args.out)
    if args.launch:
        launch(args.launch)
    return 0


def gelu():
    """GELU and quantization to int8, without 16-bit output."""
    import jax

    from swjax.kernels import dispatch

    x = jax.ShapeDtypeStruct((TOKENS, 4 * WIDTH), "bfloat16")
    gelu = dispatch.kernel("triton", "gelu")
    jax.eval_shape(lambda x: gelu(x, quantize_to="int8", high_precision=False), x)


def matmul():
    """The int8 product of an MLP's first layer, with scales and bias."""
    import jax

    from swjax.kernels import dispatch
    from swjax.kernels.reference import QTensor

    def array(dtype, *shape):
        return jax.ShapeDtypeStruct(shape, dtype)

    a = QTensor(array("int8", TOKENS, WIDTH), array("float32", TOKENS, 1))
    b = QTensor(array("int8", 4 * WIDTH, WIDTH), array("float32", 1, 1))
    bias = array("float32", 4 * WIDTH)
    matmul = dispatch.kernel("triton", "matmul")
    jax.eval_shape(lambda *x: matmul(*x, out_dtype="bfloat16"), a, b, bias)


CALLS = {"gelu": gelu, "matmul": matmul}


def compile_kernel(name: str, folder: Path) -> None:
    """Writes <name>.cubin, and <name>.json with the launch parameters."""
    import jax
    import jax.numpy as jnp

    from swjax.kernels.triton_gpu import launcher

    calls = []

    def record(*arrays, kernel, out_type, **options):
        calls.append((kernel, [*arrays, *jax.tree.leaves(out_type)], options))
        return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), out_type)

    usual, launcher.call = launcher.call, record
    try:
        CALLS[name]()
    finally:
        launcher.call = usual
    ((kernel, arrays, options),) = calls
    compiled = as_jax_triton_does(90, kernel, arrays, options)
    about = {"kernel": compiled.metadata.name, "grid": options["grid"]}
    about |= {"shared": compiled.metadata.shared, "warps": compiled.metadata.num_warps}
    about["arrays"] = [(x.shape, jnp.dtype(x.dtype).name) for x in arrays]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.cubin").write_bytes(compiled.asm["cubin"])
    (folder / f"{name}.json").write_text(json.dumps(about, indent=1) + "\n")


def as_jax_triton_does(capability: int, kernel, arrays, options):
    """Compiles a kernel as jax-triton does: pointers aligned to 16 bytes, constants, no fused multiply-add.

    Args:
      capability: of the GPU, such as 90.
      kernel: a function of `triton.jit` whose arguments are pointers, named "..._ptr", and constants.
      arrays: the arrays that the pointers point to.
      options: constants, and Triton's options of the call.
    """
    import triton
    from triton.backends.compiler import GPUTarget

    options = {name: value for name, value in options.items() if name != "grid"}
    if "registers" in options:
        options["maxnreg"] = options.pop("registers")
    pointers = [param for param in kernel.params if param.name.endswith("_ptr")]
    signature = {param.name: "constexpr" for param in kernel.params}
    signature |= {p.name: TYPES[str(a.dtype)] for p, a in zip(pointers, arrays, strict=True)}
    constants = {(p.num,): options.pop(p.name) for p in kernel.params if p not in pointers}
    aligned = {(param.num,): [["tt.divisibility", 16]] for param in pointers}
    return triton.compile(
        triton.compiler.ASTSource(kernel, signature, constants, aligned),
        target=GPUTarget("cuda", capability, 32),
        options={"enable_fp_fusion": False, **options},
    )


def launch(path: Path, times: int = 3) -> None:
    """Launches a compiled kernel on random arrays, and prints its microseconds."""
    import math

    import cupy
    import numpy as np

    about = json.loads(path.with_suffix(".json").read_text())
    kernel = cupy.RawModule(path=str(path.with_suffix(".cubin"))).get_function(about["kernel"])
    kernel.max_dynamic_shared_size_bytes = about["shared"]
    rng = cupy.random.default_rng(0)

    def random(shape, dtype):
        size = math.prod(shape)
        if dtype == "int8":
            return rng.integers(-127, 128, size, dtype=cupy.int8)
        normal = rng.standard_normal(size, dtype=cupy.float32)
        if dtype == "bfloat16":  # the upper half of a float32
            return (normal.view(cupy.uint32) >> 16).astype(cupy.uint16)
        return 0.01 * cupy.abs(normal)

    # The last two arguments of Triton's kernels are pointers to scratch memory, unused here.
    arguments = (*(random(*array) for array in about["arrays"]), np.uint64(0), np.uint64(0))
    start, end = cupy.cuda.Event(), cupy.cuda.Event()
    for _ in range(times):
        start.record()
        kernel(tuple(about["grid"]), (32 * about["warps"],), arguments, shared_mem=about["shared"])
        end.record()
        end.synchronize()
        print(f"{1e3 * cupy.cuda.get_elapsed_time(start, end):.1f} us")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
