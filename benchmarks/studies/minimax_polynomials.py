"""Polynomials of Newton-Schulz steps that move an interval of singular values closest to 1.

    python benchmarks/studies/minimax_polynomials.py                # half a minute on a CPU

Each step has the odd polynomial with the least largest distance from 1, on the interval in which the step
before ends, as in The Polar Express (https://arxiv.org/abs/2505.16932). Intervals are widened by MARGIN, so
that values that rounding lifts above 1 stay. The last polynomial is scaled so that values end below LARGEST,
as with the coefficients of Jordan et al.

Prints, for each list of degrees, the band in which singular values above 0.2 % of the norm end, the ratio of
its ends, the slope at 0, and products of m x m x m operations for m x m and m x 4m, see `cost`; and the
coefficients of `newton_schulz`.
"""

import argparse
import sys

import numpy as np
from numpy.polynomial import chebyshev
from scipy.optimize import linprog

SMALLEST, LARGEST, MARGIN = 0.002, 1.2, 0.01
NONIC = (9, 9, 9)
# {degrees: steps on one Gram matrix, for long matrices}; the first are the coefficients of Jordan et al.
CASES = {(5, 5, 5, 5): (2, 2), NONIC: (1, 2), (9, 9, 5): (1, 2), (9, 5, 5): (1, 2), (9, 9): (1, 1)}


def closest_to_one(low: float, high: float, degree: int) -> tuple[np.ndarray, float]:
    """The coefficients of degree 1, 3, ... of the polynomial, and its largest distance from 1.

    A linear program on a grid, in the basis of Chebyshev's polynomials.
    """
    cosines = low + (high - low) * (1 - np.cos(np.linspace(0, np.pi, 1000))) / 2
    x = np.union1d(np.geomspace(low, high, 1000), cosines) / high
    odd = range(1, degree + 1, 2)
    basis = np.stack([chebyshev.chebval(x, np.eye(degree + 1)[k]) for k in odd], 1)
    distance = -np.ones((len(x), 1))
    found = linprog(
        [0.0] * len(odd) + [1.0],
        np.block([[basis, distance], [-basis, distance]]),
        np.concatenate([np.ones(len(x)), -np.ones(len(x))]),
        bounds=(None, None),
    ).x
    weights = np.zeros(degree + 1)
    weights[1::2] = found[:-1]
    return chebyshev.cheb2poly(weights)[1::2] / high ** np.array(odd), found[-1]


def composed(degrees) -> list[np.ndarray]:
    """The coefficients of each step."""
    steps, low, high = [], SMALLEST, 1.0
    for degree in degrees:
        wide = low * (1 - MARGIN) if steps else low, high * (1 + MARGIN)
        coefficients, distance = closest_to_one(*wide, degree)
        steps.append(coefficients)
        low, high = 1 - distance, 1 + distance
    steps[-1] = steps[-1] * LARGEST / high
    return steps


def applied(steps, x: np.ndarray) -> np.ndarray:
    """The singular values in which the values x end, if their norm is 1."""
    for coefficients in steps:
        x = sum(c * x ** (2 * i + 1) for i, c in enumerate(coefficients))
    return x


def cost(degrees, segments, ratio: int) -> int:
    """Operations for a matrix m x (ratio m), divided by m^3; half of a symmetric product is computed.

    >>> cost((5,) * 5, (1,) * 5, 1), cost((5,) * 5, (2, 3), 4)
    (20, 41)
    """
    polynomials = sum((degree - 1) // 4 for degree in degrees)
    updates = len(degrees) - len(segments)  # a whole product and a half for G, a half for Q
    return 3 * ratio * len(segments) + polynomials + 4 * updates


def main() -> int:
    argparse.ArgumentParser(description="Prints bands and coefficients.").parse_args()
    x = np.union1d(np.geomspace(SMALLEST, 1, 20_000), np.linspace(SMALLEST, 1, 20_000))
    quintic = [np.array((3.4445, -4.7750, 2.0315))] * 5
    print(f"{'':20}{'band':>16}{'ratio':>8}{'slope':>8}{'m x m':>8}{'m x 4m':>8}")
    for degrees, segments in {(5,) * 5: (2, 3), **CASES}.items():
        steps = quintic if len(degrees) == 5 else composed(degrees)
        y = applied(steps, x)
        costs = cost(degrees, (1,) * len(degrees), 1), cost(degrees, segments, 4)
        print(
            f"{'+'.join(map(str, degrees)):20}{y.min():8.3f}{y.max():8.3f}{y.max() / y.min():8.3f}"
            f"{np.prod([c[0] for c in steps]):8.0f}{costs[0]:8}{costs[1]:8}",
            flush=True,
        )
    for coefficients in composed(NONIC):
        print(tuple(float(f"{c:.8g}") for c in coefficients))
    return 0


if __name__ == "__main__":
    sys.exit(main())
