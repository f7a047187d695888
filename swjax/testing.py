"""Checks for your own tests: does a compiled function multiply in int8 where you think it does?"""

import re
from collections import Counter
from collections.abc import Callable

import jax

_INSTRUCTION = re.compile(
    r"^\s*(?:ROOT )?%?(?P<name>[\w.-]+) = \(?(?P<type>[a-z]\w*)\[.*? (?P<op>[a-z][\w-]*)\((?P<operands>.*)",
    re.MULTILINE,
)
_OPERAND = re.compile(r"%([\w.-]+)")
# A library's product, or one of swjax's kernels, which `swjax.kernels.dispatch` names by a scope.
_CALLED_PRODUCT = re.compile(
    r'custom_call_target="[^"]*(gemm|matmul)|op_name="[^"]*swjax_(matmul|weight_gradient)/'
)
_HLO_TYPES = {"int8": ("s8", "s32"), "float8_e4m3fn": ("f8e4m3fn",), "float8_e5m2": ("f8e5m2",)}


def matrix_products(fn: Callable, *args, **kwargs) -> Counter:
    """Counts the matrix products of the compiled `fn` by the types of their operands.

    Args:
      fn: a function, jitted or not; it is compiled for `args` and not run.
      *args, **kwargs: arrays or `jax.ShapeDtypeStruct`s.

    Returns:
      Counter of (left, right) HLO types, as ("s8", "s8"). XLA for CPUs widens some int8 products to
      ("s32", "s32").

    >>> import jax.numpy as jnp, swjax
    >>> matrix_products(swjax.switchback, jnp.ones((8, 32)), jnp.ones((32, 16)))
    Counter({('s8', 's8'): 1})
    """
    jitted = fn if hasattr(fn, "lower") else jax.jit(fn)
    hlo = jitted.lower(*args, **kwargs).compile().as_text()
    found = Counter()
    for computation in re.split(r"\n\}", hlo):  # names are unique within a computation only
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
    fn: Callable, *args, dtype: str = "int8", count: int | None = None, **kwargs
) -> None:
    """Asserts that the compiled `fn` multiplies matrices whose operands are both `dtype`.

    Args:
      fn: a function, jitted or not; it is compiled for `args` and not run.
      *args, **kwargs: arrays or `jax.ShapeDtypeStruct`s.
      dtype: "int8", "float8_e4m3fn" or "float8_e5m2".
      count: how many such products there must be; None: at least one.

    Raises:
      AssertionError: there are none, or not `count`; it lists the products that were found.

    >>> import jax.numpy as jnp, swjax
    >>> assert_quantized(swjax.switchback, jnp.ones((8, 32)), jnp.ones((32, 16)), count=1)
    """
    products = matrix_products(fn, *args, **kwargs)
    seen = sum(products[hlo_type, hlo_type] for hlo_type in _HLO_TYPES[dtype])
    if seen != count if count is not None else seen == 0:
        found = ", ".join(f"{n} {lhs} x {rhs}" for (lhs, rhs), n in products.items()) or "none"
        wanted = "at least one" if count is None else str(count)
        raise AssertionError(
            f"the compiled function must have {wanted} {dtype} x {dtype} matrix product(s), found: {found}"
        )
