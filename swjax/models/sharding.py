"""How arrays are sharded: one mesh, and a table of rules from parameter paths to partition specs.

The mesh has three axes. "data" shards the batch; "fsdp" shards the batch, the parameters and the moments;
"tensor" shards the width of the layers. One device is the mesh (1, 1, 1), which runs the same code.
"""

import functools
import itertools
import math
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from swjax.kernels import targets
from swjax.linear.layouts import TOKENS, fitting_spec, partition_spec
from swjax.optax import path_name

AXES = ("data", "fsdp", "tensor")

SpecRules = tuple[tuple[str, P], ...]  # (regular expression, spec)

# The first match (re.search) wins. Block parameters are stacked, so their leading axis enumerates layers.
RULES: SpecRules = (
    (r"blocks/(attn/[qkv]|mlp/fc1)/kernel$", P(None, "fsdp", "tensor")),  # columns split
    (r"blocks/(attn/out|mlp/fc2)/kernel$", P(None, "tensor", "fsdp")),  # rows split
    (r"blocks/(attn/[qkv]|mlp/fc1)/kernel/values$", P(None, "tensor", "fsdp")),  # int8, transposed
    (r"blocks/(attn/out|mlp/fc2)/kernel/values$", P(None, "fsdp", "tensor")),
    (r"blocks/.*/(kernel/scale|lora_[ab])$", P()),
    (r"blocks/(attn/[qkv]|mlp/fc1)/bias$", P(None, "tensor")),
    (r"blocks/(attn/out|mlp/fc2)/bias$", P()),
    (r"(token_embedding|position_embedding)(/embedding)?$", P(None, "fsdp")),
    (r"patch_embed/kernel$", P(None, None, None, "fsdp")),
    (r"projection/kernel$", P("fsdp")),
    (r"(^|/)(ln_\w+|ls_\d)/\w+$", P()),
    (r"pool/(q|k|v|out|fc1|fc2)/kernel$", P("fsdp")),
    (r"(class_embedding|logit_scale|logit_bias|pool/probe)$", P()),
    (r"(patch_embed|projection|pool/\w+)/(bias|scale)$", P()),
)


def make_mesh(
    data: int = -1, fsdp: int = 1, tensor: int = 1, *, devices: Sequence[jax.Device] | None = None
) -> Mesh:
    """Arranges the devices in a mesh with axes ("data", "fsdp", "tensor").

    Args:
      data, fsdp, tensor: number of devices along each axis; one of them may be -1, for all remaining devices.
      devices: devices of the mesh; default all of `jax.devices()`, ordered by process.

    Raises:
      ValueError: the sizes do not multiply to the number of devices.

    >>> dict(make_mesh(devices=jax.devices()[:1]).shape)
    {'data': 1, 'fsdp': 1, 'tensor': 1}
    """
    if devices is None:  # TPUs are numbered by position, across processes
        devices = sorted(jax.devices(), key=lambda device: device.process_index)
    return Mesh(np.asarray(devices).reshape(mesh_sizes(len(devices), data, fsdp, tensor)), AXES)


def mesh_sizes(count: int, data: int = -1, fsdp: int = 1, tensor: int = 1) -> tuple[int, ...]:
    """The axis sizes of `make_mesh` for a number of devices.

    Raises:
      ValueError: the sizes do not multiply to the number of devices.

    >>> mesh_sizes(8, data=-1, fsdp=4)
    (2, 4, 1)
    """
    sizes = [data, fsdp, tensor]
    if -1 in sizes:
        rest = math.prod(size for size in sizes if size != -1)
        sizes[sizes.index(-1)] = count // max(rest, 1)
    if min(sizes) < 1 or math.prod(sizes) != count:
        raise ValueError(
            f"mesh data={data}, fsdp={fsdp}, tensor={tensor} does not multiply to the {count} "
            f"device(s) here: change config.mesh, or leave one size -1"
        )
    return tuple(sizes)


@dataclass(frozen=True)
class Share:
    """A process's share of every batch.

    Attributes:
      index: index of the share, in the order of the batch's rows.
      readers: for each share one process that reads it; for this process's share, this process. Processes
        that a "tensor" axis spans read the same rows.
    """

    index: int
    readers: tuple[int, ...]

    @property
    def count(self) -> int:
        return len(self.readers)


def batch_share(mesh: Mesh, process: int | None = None) -> Share:
    """Returns the share of every batch that a process reads for its devices on this mesh.

    Args:
      mesh: mesh of all devices.
      process: index of the process; None means this process.

    Raises:
      ValueError: the rows of two processes overlap partly, or alternate.

    >>> batch_share(make_mesh()).count
    1
    """
    process = jax.process_index() if process is None else process
    rows: dict[int, set[int]] = {}
    for row, devices in enumerate(mesh.devices.reshape(-1, mesh.shape["tensor"])):
        for device in devices:
            rows.setdefault(device.process_index, set()).add(row)
    parts = sorted({tuple(sorted(part)) for part in rows.values()})
    # Shares in the order of the processes are rows in the order of the batch.
    if list(itertools.chain(*parts)) != list(range(mesh.shape["data"] * mesh.shape["fsdp"])):
        raise ValueError(
            f"mesh {dict(mesh.shape)} splits the batch across processes unevenly: order the devices by "
            f"process, and make tensor a divisor or a multiple of the {len(mesh.local_devices)} of a process"
        )
    own = tuple(sorted(rows[process]))
    first = {part: min(p for p in rows if tuple(sorted(rows[p])) == part) for part in parts}
    return Share(parts.index(own), tuple((first | {own: process})[part] for part in parts))


def compiler_options(mesh: Mesh | None = None, *, concurrent: bool = False) -> dict[str, str]:
    """XLA options for programs with a model, without the options that the environment sets in XLA_FLAGS.

    On GPUs, XLA computes products with cuBLAS instead of its own Triton kernels: cuBLAS adds biases in the
    epilogues of the products, and XLA's Triton kernels sum some int8 products wrongly. With FSDP, collectives
    that gather weights and scatter gradients combine up to 128 MiB instead of 30 MiB. The speed-ups are in
    benchmarks/notes/speed.md and scaling.md.

    Args:
      mesh: the mesh of the program; None for the default device.
      concurrent: whether independent kernels run at the same time.

    >>> compiler_options()
    {}
    """
    platform = targets.platform(mesh.abstract_mesh if mesh else None)
    if platform != "gpu":
        return {}
    options = {"xla_gpu_enable_triton_gemm": "False"}
    if concurrent:
        options["xla_gpu_command_buffer_scheduling_mode"] = "CONCURRENT"
    if mesh and mesh.shape["fsdp"] > 1:
        for collective in ("all_gather", "reduce_scatter"):
            options[f"xla_gpu_{collective}_combine_threshold_bytes"] = str(2**27)
    flags = os.environ.get("XLA_FLAGS", "").split()
    given = {flag.lstrip("-").partition("=")[0] for flag in flags}
    return {name: value for name, value in options.items() if name not in given}


def spec_of(name: str, rules: SpecRules = RULES) -> P:
    """The partition spec of the parameter at a path.

    >>> tuple(spec_of("vision/blocks/mlp/fc1/kernel"))
    (None, 'fsdp', 'tensor')

    Raises:
      ValueError: no rule matches.
    """
    for pattern, spec in rules:
        if re.search(pattern, name):
            return spec
    raise ValueError(f"no sharding rule matches parameter {name!r}: add one to sharding.RULES")


def abstract_state(state: Any, mesh: Mesh, rules: SpecRules = RULES) -> Any:
    """Returns the sharding of each array of a train state.

    A leaf is sharded like a parameter if its path ends in the parameter's path and the shapes agree, such as
    an optimizer moment or an average, or the codes of one in 8 bits. All other leaves (step, counts, RMS,
    ranges of codes) are replicated.

    Args:
      state: tree of ShapeDtypeStructs or arrays, with the parameters in `state["params"]`.
      mesh: mesh of all devices.
      rules: (regular expression, PartitionSpec) pairs; the first expression found in the path applies.

    Returns:
      A tree of ShapeDtypeStructs with NamedShardings.

    Raises:
      ValueError: no rule matches a parameter.
    """
    params = {path_name(p): x for p, x in jax.tree_util.tree_leaves_with_path(state["params"])}
    specs = {name: spec_of(name, rules) for name in params}

    def place(path, leaf):
        keys = path_name(path).split("/")
        suffixes = ("/".join(keys[start:]) for start in range(len(keys)))
        owner = next((s for s in suffixes if s in params and params[s].shape == leaf.shape), None)
        spec = P() if owner is None else _fit(specs[owner], leaf.shape, mesh)
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec))

    return jax.tree_util.tree_map_with_path(place, state)


def _fit(spec: P, shape: tuple[int, ...], mesh: Mesh) -> P:
    """Replicates each dimension over the mesh axes that do not divide it."""
    return partition_spec(fitting_spec(spec, shape, mesh.abstract_mesh))


def gather_params(params: Any) -> Any:
    """Replicates the parameters outside the blocks; quantized layers gather the block parameters themselves.

    Otherwise XLA would move activations to the shards of an embedding. The backward pass reduce-scatters the
    gradients. On one device, or outside `jax.jit`, the function does nothing.

    Args:
      params: tree of arrays, with names as for `spec_of`, rooted anywhere below the model.
    """

    def leaf(path, x):
        mesh, name = jax.typeof(x).sharding.mesh, path_name(path)
        if mesh.empty or mesh.size == 1 or "blocks/" in name:
            return x
        spec = spec_of(name, RULES)
        return _gather(x, NamedSharding(mesh, _fit(spec, x.shape, mesh))) if any(spec) else x

    return jax.tree_util.tree_map_with_path(leaf, params)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _gather(x, at_rest: NamedSharding):
    return jax.lax.with_sharding_constraint(x, NamedSharding(at_rest.mesh, P()))


def _scatter(at_rest, _, g):
    # The gradient is replicated first. Otherwise XLA moves the activations' gradients to the embedding's
    # shards.
    return (jax.lax.with_sharding_constraint(_gather(g, at_rest), at_rest),)


_gather.defvjp(lambda x, at_rest: (_gather(x, at_rest), None), _scatter)


def shard_batch(batch: Any, mesh: Mesh) -> Any:
    """Copies this process's rows of the global batch to its devices, sharded along the leading dimension."""
    return jax.tree.map(
        lambda x: jax.make_array_from_process_local_data(NamedSharding(mesh, TOKENS), x), batch
    )
