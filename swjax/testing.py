"""Checks for your own tests: which products and collectives of a compiled function use int8."""

import re
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from swjax.kernels import dispatch

_INSTRUCTION = re.compile(
    r"^\s*(?:ROOT )?%?(?P<name>[\w.-]+) = \(?(?P<type>[a-z]\w*)\[.*? (?P<op>[a-z][\w-]*)\((?P<operands>.*)",
    re.MULTILINE,
)
_OPERAND = re.compile(r"%([\w.-]+)")
# A library's product, or one of swjax's kernels: functions named by `swjax.kernels.dispatch`.
_CALLED_PRODUCT = re.compile(
    r'custom_call_target="[^"]*(gemm|matmul)'
    r'|op_name="[^"]*swjax_(matmul|weight_gradient)(_sum|_group)?\b'
)
_HLO_TYPES = {"int8": ("s8", "s32"), "float8_e4m3fn": ("f8e4m3fn",), "float8_e5m2": ("f8e5m2",)}


def matrix_products(fn: Callable, *args: Any, **kwargs: Any) -> Counter:
    """Counts the matrix products of the compiled `fn` by operand types.

    Args:
      fn: a function, jitted or not; it is compiled for `args`, but not run.
      *args, **kwargs: arrays or `jax.ShapeDtypeStruct`s.

    Returns:
      Counter of (left, right) HLO types, such as ("s8", "s8"). XLA for CPUs converts some int8 products to
      ("s32", "s32"). A kernel that computes several products, on Hopper, counts as one.

    >>> import jax.numpy as jnp, swjax
    >>> matrix_products(swjax.switchback, jnp.ones((8, 32)), jnp.ones((32, 16)))
    Counter({('s8', 's8'): 1})
    """
    hlo = _compiled(fn, *args, **kwargs)
    found: Counter[tuple[str, str]] = Counter()
    for computation in re.split(r"\n\}", hlo):  # names are unique only within a computation
        instructions = list(_INSTRUCTION.finditer(computation))
        types = {instruction["name"]: instruction["type"] for instruction in instructions}
        for instruction in instructions:
            called = instruction["op"] == "custom-call"
            if instruction["op"] == "dot" or (
                called and _CALLED_PRODUCT.search(instruction["operands"])
            ):
                lhs, rhs = _OPERAND.findall(instruction["operands"])[:2]
                found[types[lhs], types[rhs]] += 1
    return found


def assert_quantized(
    fn: Callable, *args: Any, dtype: str = "int8", count: int | None = None, **kwargs: Any
) -> None:
    """Asserts that the compiled `fn` contains matrix products with both operands in `dtype`.

    Args:
      fn: a function, jitted or not, or an NNX model or its method; it is compiled for `args`, but not run.
      *args, **kwargs: arrays, `jax.ShapeDtypeStruct`s or models; others are static. Pass a model that `fn`
        uses as an argument, as in `assert_quantized(lambda model, x: model(x), model, x)`: Flax refuses to
        change the random state of a model that `fn` closes over, such as that of dropout.
      dtype: "int8", "float8_e4m3fn" or "float8_e5m2".
      count: required number of such products; None requires at least one.

    Raises:
      AssertionError: the number of such products is wrong; the message lists the products found.
      ValueError: there is no such dtype.

    >>> import jax.numpy as jnp, swjax
    >>> assert_quantized(swjax.switchback, jnp.ones((8, 32)), jnp.ones((32, 16)), count=1)
    """
    if dtype not in _HLO_TYPES:
        raise ValueError(f"dtype must be one of {', '.join(_HLO_TYPES)}, got {dtype!r}")
    products = matrix_products(fn, *args, **kwargs)
    seen = sum(products[hlo_type, hlo_type] for hlo_type in _HLO_TYPES[dtype])
    if seen != count if count is not None else seen == 0:
        found = ", ".join(f"{n} {lhs} x {rhs}" for (lhs, rhs), n in products.items()) or "none"
        wanted = "at least one" if count is None else str(count)
        emulated = "; fp8 products are emulated where the hardware has none"
        raise AssertionError(
            f"the compiled function must have {wanted} {dtype} x {dtype} matrix product(s), found: {found}"
            + emulated * dtype.startswith("float8")
        )


def implementations(fn: Callable, *args: Any, **kwargs: Any) -> Counter[tuple[str, str]]:
    """Counts the operations of swjax that `fn` computes, and which implementation computes each.

    Args:
      fn: a function, jitted or not; it is traced for `args`, but not compiled and not run.
      *args, **kwargs: arrays or `jax.ShapeDtypeStruct`s.

    Returns:
      Counter of (operation, implementation): see `swjax.kernels.dispatch`. Products that are not quantized
      run through XLA and are not counted, except weight gradients.

    >>> import jax.numpy as jnp, swjax
    >>> used = implementations(swjax.switchback, jnp.ones((8, 32)), jnp.ones((32, 16)))
    >>> used["matmul", "xla"]
    1
    """
    with dispatch.record() as calls:
        jax.eval_shape(*_of_arrays(fn, args, kwargs))
    return Counter(calls)


# For a pair -start and -done, the result of -done: the result of -start also contains the operands.
_COLLECTIVE = re.compile(
    r" = (?P<results>.*) (?P<op>all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute)"
    r"(-done)?\("
)
_RESULT = re.compile(r"([a-z]\w*)\[([\d,]*)\]")


class Collective(NamedTuple):
    """One array that the devices of a compiled function exchange.

    Attributes:
      op: HLO name, such as "all-gather".
      dtype: HLO type, such as "s8".
      shape: shape of the result on each device.
    """

    op: str
    dtype: str
    shape: tuple[int, ...]


def collectives(fn: Callable, *args: Any, **kwargs: Any) -> list[Collective]:
    """The arrays that devices exchange in the compiled `fn`.

    Args:
      fn: a function, jitted or not; it is compiled for `args`, but not run. Or a compiled function.
      *args, **kwargs: arrays or `jax.ShapeDtypeStruct`s sharded as in your program.

    Returns:
      One entry per array; a combined collective has several.

    >>> import jax.numpy as jnp, swjax
    >>> collectives(swjax.switchback, jnp.ones((8, 32)), jnp.ones((32, 16)))
    []
    """
    return _collectives(_compiled(fn, *args, **kwargs))


def _collectives(hlo: str) -> list[Collective]:
    found = []
    for line in _COLLECTIVE.finditer(hlo):
        for dtype, sizes in _RESULT.findall(line["results"]):
            shape = tuple(int(size) for size in sizes.split(",") if size)
            found.append(Collective(line["op"], dtype, shape))
    return found


def assert_quantized_gathers(
    fn: Callable, *args: Any, weights: list[tuple[int, int]], dtype: str = "int8", **kwargs: Any
) -> None:
    """Asserts that the devices of the compiled `fn` gather only weights, in 8 bits.

    Args:
      fn: a function, jitted or not; it is compiled for `args`, but not run.
      *args, **kwargs: arrays or `jax.ShapeDtypeStruct`s sharded as in your program.
      weights: shapes [k, n] of the weights. A gathered array counts as a weight if its sizes, in either
        order, are k and n or tensor-parallel parts of them. If it has three sizes, the first is the number of
        devices whose parts follow each other. Vectors of scales and biases are allowed.
      dtype: type of the gathered weights: "int8", also for fp8, which is sent as bytes; or an HLO type name.

    Raises:
      AssertionError: an array is gathered in another type, is not a weight, or is moved by an all-to-all or
        a collective-permute, which shows that an array is not sharded as its layout says.

    >>> import jax.numpy as jnp, swjax
    >>> x, w = jnp.ones((8, 32)), jnp.ones((32, 16))
    >>> assert_quantized_gathers(swjax.switchback, x, w, weights=[w.shape])
    """
    narrow = {"int8": "s8"}.get(dtype, dtype)
    for found in collectives(fn, *args, **kwargs):
        op, found_dtype, shape = found
        matrix = [size for size in shape if size > 1]
        if op in ("all-reduce", "reduce-scatter") or len(matrix) < 2:
            continue
        fits = any(_is_part(matrix, w) or _is_part(matrix, w[::-1]) for w in weights)
        if op != "all-gather" or found_dtype != narrow or not fits:
            raise AssertionError(
                f"devices must exchange nothing but sums and {narrow} gathers of weights {weights}, "
                f"found {op} {found_dtype}{list(shape)}: set the shardings of the arrays, see swjax.Layout"
            )


def _is_part(shape, whole) -> bool:
    if len(shape) == 3:
        count, rows, columns = shape
        return _is_part([count * rows, columns], whole) or _is_part([rows, count * columns], whole)
    return len(shape) == 2 and all(size % part == 0 for part, size in zip(shape, whole))


def _compiled(fn, *args, **kwargs) -> str:
    if isinstance(fn, jax.stages.Compiled):
        return fn.as_text() or ""
    owner, nnx = getattr(fn, "__self__", fn), sys.modules.get("flax.nnx")
    if nnx and isinstance(owner, nnx.Module):  # as an argument, a trace may change its random state
        fn, args = (type(fn).__call__ if owner is fn else fn.__func__), (owner, *args)
    if hasattr(fn, "lower"):
        return fn.lower(*args, **kwargs).compile().as_text() or ""
    of_arrays, arrays = _of_arrays(fn, args, kwargs)
    return jax.jit(of_arrays).lower(arrays).compile().as_text() or ""


def _of_arrays(fn: Callable, args: tuple, kwargs: dict) -> tuple[Callable, dict[int, Any]]:
    """A function of the arrays among the arguments, and these by number; the others are static."""
    leaves, tree = jax.tree.flatten((args, kwargs))
    arrays = {i: leaf for i, leaf in enumerate(leaves) if hasattr(leaf, "dtype")}

    def of_arrays(arrays):
        args, kwargs = jax.tree.unflatten(tree, [arrays.get(i, x) for i, x in enumerate(leaves)])
        return fn(*args, **kwargs)

    return of_arrays, arrays
