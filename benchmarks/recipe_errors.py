"""Relative errors of y, dx and dw of one layer in every recipe, as the table of docs/recipes.md.

    python benchmarks/recipe_errors.py

Errors are those of float32 inputs against float64 products, on drawn data:

- normal: all arrays are normal;
- outliers: six of the 1,024 channels of x are 30 times as large. Errors are relative to what the other
  channels contribute: y without those six, and the other rows of dw;
- tokens: each token of x and g is multiplied by exp(z), z normal. Errors of y and dx are means over tokens.
"""

import argparse
import functools

import jax
import jax.numpy as jnp
import numpy as np

import swjax

TOKENS, K, N = 4096, 1024, 768
DATA = ("normal", "outliers", "tokens")


def draw(data: str) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Returns x [tokens, k], w [k, n] and g [tokens, n] in float32, and which channels of x are ordinary."""
    random = np.random.default_rng(0)
    x, w, g = (
        random.standard_normal(shape, np.float32) for shape in ((TOKENS, K), (K, N), (TOKENS, N))
    )
    ordinary = np.ones(K, bool)
    if data == "outliers":
        ordinary[5::171] = False
        x[:, ~ordinary] *= 30
    if data == "tokens":
        x, g = (a * np.exp(random.standard_normal((TOKENS, 1), np.float32)) for a in (x, g))
    return x, w, g, ordinary


@functools.partial(jax.jit, static_argnums=3)
def products(x: jax.Array, w: jax.Array, g: jax.Array, recipe: str) -> tuple[jax.Array, ...]:
    """Returns y, dx and dw."""
    y, vjp = jax.vjp(functools.partial(swjax.switchback, recipe=recipe), x, w)
    return y, *vjp(g)


def errors(data: str, recipes: tuple[str, ...]) -> dict[str, tuple[float, float, float]]:
    """The relative errors of y, dx and dw of each recipe."""
    x, w, g, ordinary = draw(data)
    wide = [a.astype(np.float64) for a in (x, w, g)]
    y, dx, dw = wide[0] @ wide[1], wide[2] @ wide[1].T, wide[0].T @ wide[2]
    part = wide[0][:, ordinary] @ wide[1][ordinary]
    arrays = tuple(map(jnp.asarray, (x, w, g)))
    axis = -1 if data == "tokens" else None
    found = {}
    for recipe in recipes:
        got = [np.asarray(a, np.float64) for a in products(*arrays, recipe)]
        found[recipe] = (
            _relative(got[0] - y, part, axis),
            _relative(got[1] - dx, dx, axis),
            _relative((got[2] - dw)[ordinary], dw[ordinary], None),
        )
    return found


def _relative(error: np.ndarray, value: np.ndarray, axis: int | None) -> float:
    return float(np.mean(np.linalg.norm(error, axis=axis) / np.linalg.norm(value, axis=axis)))


def table(recipes: tuple[str, ...] = tuple(swjax.RECIPES)) -> str:
    """The errors in percent, as a table in Markdown."""
    columns = [errors(data, recipes) for data in DATA]
    names = [f"{data}:&nbsp;y|dx|dw" for data in DATA]
    rows = [["recipe", *names], ["---"] * (1 + 3 * len(names))]
    for recipe in recipes:
        percents = (100 * error for column in columns for error in column[recipe])
        rows.append([f"`{recipe}`", *(f"{p:.2g}" if p > 1e-3 else "0" for p in percents)])
    return "\n".join(f"|{'|'.join(row)}|" for row in rows)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--recipes", nargs="+", default=list(swjax.RECIPES), choices=swjax.RECIPES)
    print(table(tuple(parser.parse_args().recipes)))
