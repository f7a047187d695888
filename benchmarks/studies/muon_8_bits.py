"""Singular values of Muon's updates if products of some Newton-Schulz steps have operands of 8 bits.

    python benchmarks/studies/muon_8_bits.py                # a minute on a CPU

Everything but the operands is in float64. Each row of X has a scale, in both products of a step: the Gram
matrix, and the polynomial times X, whose columns take the scales of X. Its multiple of the identity is added
apart, so that it is not rounded. Prints, for each dtype and choice of steps, the smallest and the largest
singular value of the result for those above 0.2 % of the norm, and the largest error of the values along the
singular vectors of X. The band without rounding is 0.68 to 1.21.
"""

import argparse
import sys
from pathlib import Path

import ml_dtypes
import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.studies.gram_matrices import wanted  # noqa: E402
from swjax.optax import newton_schulz  # noqa: E402

LARGEST = {"int8": 127.0, "float8_e4m3fn": 448.0}
STEPS = {
    "none": (),
    "first": (0,),
    "first two": (0, 1),
    "last": (4,),
    "last two": (3, 4),
    "all": range(5),
}


def matrices(m: int, n: int) -> dict[str, np.ndarray]:
    """{spectrum: [m, n] in float64}."""
    rng = np.random.default_rng(0)
    u, v = (np.linalg.qr(rng.normal(size=(size, m)))[0] for size in (m, n))
    of = lambda values: (u * values) @ v.T
    low = np.full(m, 1e-2)
    low[:8] = 1
    found = {"normal": rng.normal(size=(m, n)), "heavy tails": rng.standard_t(2, size=(m, n))}
    found |= {"rank 8": of(low), "power law": of(np.arange(1, m + 1) ** -1.0)}
    return found | {f"1e{k}": of(np.logspace(0, -k, m)) for k in (3, 4, 6)}


def rounded(x: np.ndarray, dtype: str) -> np.ndarray:
    """x with its rows rounded to 8 bits."""
    scale = np.abs(x).max(1, keepdims=True) / LARGEST[dtype]
    q = x / np.maximum(scale, 1e-300)
    return scale * (
        np.rint(q) if dtype == "int8" else q.astype(ml_dtypes.float8_e4m3fn).astype(float)
    )


def orthogonalized(x: np.ndarray, dtype: str, steps) -> np.ndarray:
    """Five quintic steps, of which some have 8-bit operands."""
    a, b, c = newton_schulz.COEFFICIENTS["quintic"][0]
    x = x / np.linalg.norm(x)
    for i in range(5):
        if i not in steps:
            gram = x @ x.T
            x = a * x + (b * gram + c * gram @ gram) @ x
            continue
        scale = np.abs(x).max(1) / LARGEST[dtype]
        narrow = rounded(x, dtype)
        gram = narrow @ narrow.T
        # Its columns take the scales of x, so that both operands of the product have scales of rows only.
        polynomial = rounded((b * gram + c * gram @ gram) * scale, dtype) / scale
        x = a * x + polynomial @ narrow
    return x


def main() -> int:
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    for shape in ((256, 256), (256, 1024)):
        spectra = matrices(*shape)
        print(f"\n{shape[0]} x {shape[1]}".ljust(30) + "".join(f"{name:>21}" for name in spectra))
        for dtype, (label, steps) in ((d, s) for d in LARGEST for s in STEPS.items()):
            line = f"{dtype:15}{label:15}"
            for x in spectra.values():
                u, values, vt = np.linalg.svd(x / np.linalg.norm(x), full_matrices=False)
                y = orthogonalized(x, dtype, steps)
                large = values >= 0.002
                kept = np.einsum("ji,jk,ik->i", u, y, vt)
                found = np.linalg.svd(y, compute_uv=False)[: large.sum()]
                error = np.abs(kept - wanted(values, "quintic"))[large].max()
                line += f"{found.min():8.2f}{found.max():6.2f}{error:7.3f}"
            print(line, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
