"""Counts the time of layers on TPUs from compiled programs, without a TPU: bounds, not measurements.

  python -m benchmarks.tpu --out benchmarks/results/tpu_compiled.json     # libtpu, and some minutes
  python -m benchmarks.tpu --kernels --out ...                            # adds the kernels' instructions

A layer is 8,192 or 32,768 x 1280 -> 5120, an MLP LayerNorm, 1280 -> 5120, GELU, -> 1280 on 32,768 tokens;
both forward and backward, in bf16 ("standard"), in int8 by XLA alone ("xla") and with our kernels
("pallas_tpu"). The time of an operation of the optimized HLO is the larger of its products at the chip's peak
and the bytes in HBM that it reads and writes at the chip's bandwidth. Copies that run during other operations
count where these leave no bandwidth. Neither the vector units nor latencies count: for the kernels,
`--kernels` records bundles (one instruction word per cycle) of a block of 128 rows.
"""

import argparse
import json
import math
import os
import re
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax

import swjax
from swjax.kernels import chips, dispatch, targets
from swjax.kernels.fused_products.reference import Factors
from swjax.kernels.pallas_tpu import rows
from swjax.kernels.reference import QTensor

# {topology: (chip, bandwidth of HBM in bytes/s)}, from `jax._src.tpu_info`.
CHIPS = {"v5e:2x2": ("TPU v5e", 819e9), "v6e:2x2": ("TPU v6e", 1638e9)}
ARMS = {
    "standard": ("standard", None),
    "xla": ("switchback", "xla"),
    "pallas_tpu": ("switchback", None),
}
K, N = 1280, 5120
SIZES = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f32": 4, "s32": 4, "u32": 4}
FREE = ("parameter", "constant", "tuple", "get-tuple-element", "bitcast")


class Operation(NamedTuple):
    """An operation of the entry computation: its name, products and bytes in HBM, in seconds."""

    name: str
    products: float
    memory: float

    @property
    def seconds(self) -> float:
        return max(self.products, self.memory)


def seconds(text: str, chip: chips.Chip, bandwidth: float) -> float:
    """The bound of a program from its optimized HLO."""
    computations, entry = parsed(text)
    found, copies = [], 0.0
    for name, (shape, opcode, rest) in computations[entry].items():
        operands = re.findall(r"%[\w.-]+", rest.split("), ")[0])
        if opcode in FREE or opcode.endswith("-done") or "ConcatBitcast" in rest:
            continue
        if opcode.endswith("-start"):  # (source, destination, context)
            copies += bytes_of(shape.split(", ")[1] if "slice" in opcode else shape) / bandwidth
            continue
        known = computations[entry]
        moved = bytes_of(shape) + sum(
            bytes_of(known[each][0]) for each in operands if each in known
        )
        work = list(products(computations, opcode, rest, shape, operands, entry))
        peaks = (operations / (chip.peak(dtype) * 1e12) for dtype, operations in work)
        found.append(Operation(name, sum(peaks), moved / bandwidth))
    slack = sum(each.seconds - each.memory for each in found)
    return sum(each.seconds for each in found) + max(0.0, copies - slack)


def parsed(text: str) -> tuple[dict[str, dict[str, tuple[str, str, str]]], str]:
    """{computation: {instruction: (shape, opcode, rest)}}, and the name of the entry computation."""
    computations: dict[str, dict[str, tuple[str, str, str]]] = {}
    name = entry = ""
    for line in text.splitlines():
        if header := re.match(r"(ENTRY )?(%[\w.-]+) \(.*\) -> .*\{$", line):
            name = header[2]
            entry = name if header[1] else entry
            computations[name] = {}
        elif found := re.match(r"\s+(?:ROOT )?(%[\w.-]+) = (\(.*?\)|\S+) ([\w-]+)\((.*)$", line):
            computations[name][found[1]] = (found[2], found[3], found[4])
    return computations, entry


def arrays_of(shape: str) -> Iterator[tuple[str, list[int], bool]]:
    """Yields (dtype, dimensions, whether in VMEM) of each array of a shape in HLO."""
    for dtype, dimensions, layout in re.findall(r"(\w+)\[([\d,]*)\](\{[^}]*\})?", shape):
        yield dtype, [int(n) for n in dimensions.split(",") if n], "S(1)" in layout


def bytes_of(shape: str) -> float:
    """Bytes in HBM; XLA keeps some arrays in VMEM."""
    every = arrays_of(shape)
    return sum(SIZES.get(dtype, 0) * math.prod(n) for dtype, n, in_vmem in every if not in_vmem)


def products(
    computations: dict, opcode: str, rest: str, shape: str, operands: list[str], within: str
) -> Iterator[tuple[str, int]]:
    """Yields (dtype, operations) of the products of an instruction."""
    known = computations[within]
    types = [next(arrays_of(known[each][0])) for each in operands if each in known]
    if opcode == "convolution":
        (dtype, a, _), (_, b, _) = types[:2]
        out = math.prod(next(arrays_of(shape))[1])
        yield jnp_name(dtype), 2 * out * math.isqrt(math.prod(a) * math.prod(b) // out)
    elif opcode == "custom-call" and "tpu_custom_call" in rest:
        weights = [n for dtype, n, _ in types if dtype == "s8"]
        tokens = max(n[0] for dtype, n, _ in types if dtype == "bf16")
        yield from (("int8", 2 * tokens * math.prod(n)) for n in weights)
    elif called := re.search(r"calls=(%[\w.-]+)", rest):
        for inner, code, more in computations[called[1]].values():
            names = re.findall(r"%[\w.-]+", more.split("), ")[0])
            yield from products(computations, code, more, inner, names, called[1])


def jnp_name(dtype: str) -> str:
    return {"s8": "int8", "bf16": "bfloat16", "f32": "float32"}[dtype]


# --- programs -----------------------------------------------------------------------------------------


def layer(x, w, *, options: dict[str, Any]):
    return swjax.switchback(x, w, **options)


def mlp(x, scale, offset, w1, b1, w2, b2, *, options: dict[str, Any]):
    prologue = swjax.LayerNorm(scale, offset)
    return swjax.mlp(x, w1, b1, w2, b2, prologue=prologue, **options)


def cases(array: Callable) -> Iterator[tuple[str, Callable, tuple, Any]]:
    """Yields (name, function, arguments, gradient of the result)."""
    for tokens in (8192, 32_768):
        x, g = array((tokens, K), "bfloat16"), array((tokens, N), "bfloat16")
        yield f"layer, {tokens} tokens", layer, (x, array((K, N))), g
    vectors = array((K,)), array((K,))
    weights = array((K, N)), array((N,)), array((N, K)), array((K,))
    yield f"MLP, {tokens} tokens", mlp, (x, *vectors, *weights), x


def compiled(function: Callable, *arguments: Any, device: jax.Device) -> str:
    with targets.compiling_for(device):
        lowered = jax.jit(function).trace(*arguments).lower(lowering_platforms=("tpu",))
        return lowered.compile().as_text()


def both_ways(function: Callable, *arguments_and_gradient):
    *arguments, g = arguments_and_gradient
    y, vjp = jax.vjp(function, *arguments)
    return y, *vjp(g)


def bounds(topology: str, name: str, bandwidth: float) -> Iterator[dict[str, Any]]:
    device, array = on(topology)
    for case, function, arguments, g in cases(array):
        row: dict[str, Any] = {"chip": name, "case": case}
        for arm, (recipe, implementation) in ARMS.items():
            options = {"recipe": recipe, "implementation": implementation}
            whole = partial(both_ways, partial(function, options=options))
            text = compiled(whole, *arguments, g, device=device)
            row[f"{arm}_us"] = round(seconds(text, chips.named(name), bandwidth) * 1e6, 1)
        for arm in ("xla", "pallas_tpu"):
            row[f"{arm}_over_bf16"] = round(row["standard_us"] / row[f"{arm}_us"], 3)
        yield row


# --- kernels ------------------------------------------------------------------------------------------


def kernels(array: Callable) -> dict[str, tuple[str, tuple, dict[str, Any]]]:
    """{name: (operation, arrays, options)} of the kernels of the MLP and of the layer alone."""
    tokens = 1024
    x, h = array((tokens, K), "bfloat16"), array((tokens, N), "bfloat16")
    vector, one = array((K,)), array((1, 1))
    w1, w2 = QTensor(array((K, N), "int8"), one), QTensor(array((N, K), "int8"), one)
    forward: dict[str, Any] = {"axis": 0, "out_dtype": "bfloat16", "settings": ()}
    norm = {"settings": (("epsilon", 1e-6),)}
    gelu = {"settings": (("approximate", False),)}
    other = {"settings": (*gelu["settings"], ("quantize_to", None), ("recompute", False))}
    quantized = {"quantize_to": "int8", "high_precision": False}
    back = "fused_product_backward"
    return {
        "quantize": ("quantize", (h,), {}),
        "layer_norm": ("layer_norm", (x, vector, vector), quantized | {"epsilon": 1e-6}),
        "rms_norm": ("rms_norm", (x, vector), quantized | {"epsilon": 1e-6}),
        "gelu": ("gelu", (h,), quantized),
        "gated": ("gated", (h, h), quantized),
        "quantize, product": ("fused_product", ((x,), w1), forward | {"row_operation": None}),
        "quantize, product with wT": (
            "fused_product", ((h,), w1), forward | {"row_operation": None, "axis": -1},
        ),
        "layer_norm, product": (
            "fused_product", ((x, vector, vector), w1), forward | norm | {"row_operation": "layer_norm"},
        ),
        "gelu, product": ("fused_product", ((h,), w2), forward | gelu | {"row_operation": "gelu"}),
        "product, gelu_backward": (
            back, (h, Factors(x, w2)), other | {"row_operation": "gelu_backward"},
        ),
        "product, layer_norm_backward": (
            back, (x, vector, Factors(h, w1), None, vector), norm | {"row_operation": "layer_norm_backward"},
        ),
    }  # fmt: skip


def instructions(topology: str, name: str, folder: str) -> Iterator[dict[str, Any]]:
    """Yields the compiler's figures for each kernel; it writes schedules to `folder`."""
    device, array = on(topology)
    for case, (operation, arrays, options) in kernels(array).items():
        function = partial(dispatch.run, operation, implementation="pallas_tpu", **options)
        text = compiled(function, *arrays, device=device)
        dumps = {path: path.read_text() for path in Path(folder).glob("*swjax*final_bundles.txt")}
        (bundles,) = re.findall(r"total scheduled bundles:\s+(\d+)", "".join(dumps.values()))
        used = re.findall(
            r'"used_scoped_memory_configs":\[\{"memory_space":"1"[^}]*"size":"(\d+)"', text
        )
        for path in Path(folder).iterdir():
            path.unlink()
        row = {"chip": name, "kernel": case, "rows": rows.ROWS, "bundles": int(bundles)}
        yield row | {"vmem_bytes": max(map(int, used), default=None)}


def on(topology: str) -> tuple[jax.Device, Callable]:
    """The first device of a topology, and a function that describes an array on it."""
    from jax.experimental import topologies

    device = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices[0]
    placed = jax.sharding.SingleDeviceSharding(device)
    return device, lambda shape, dtype="float32": jax.ShapeDtypeStruct(
        shape, dtype, sharding=placed
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kernels", action="store_true", help="the instructions of each kernel")
    parser.add_argument("--out", type=Path, help="JSON file, whose other part is kept")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if args.kernels:  # libtpu reads it when it starts
            os.environ["LIBTPU_INIT_ARGS"] = (
                f"--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true"
            )
        found = []
        for topology, (name, bandwidth) in CHIPS.items():
            every = (
                instructions(topology, name, folder)
                if args.kernels
                else bounds(topology, name, bandwidth)
            )
            for row in every:
                found.append(row)
                print("  ".join(f"{key} {value}" for key, value in row.items()), flush=True)
    if args.out:
        known = json.loads(args.out.read_text()) if args.out.exists() else {}
        known |= {"jax": jax.__version__, "kernels" if args.kernels else "bounds": found}
        args.out.write_text(json.dumps(known, indent=1) + "\n")


if __name__ == "__main__":
    main()
