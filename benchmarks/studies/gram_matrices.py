"""How many Newton-Schulz steps one Gram matrix may serve, by the singular values of Muon's updates.

    python benchmarks/studies/gram_matrices.py                # half a minute on a CPU

Prints, for each dtype and division of the steps into segments with one Gram matrix each, the largest
singular value of the results, and the largest error of those above 0.2 % of the norm, against float64.
"""

import argparse
import itertools
import sys
from pathlib import Path
from unittest import mock

import jax
import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from swjax.optax import newton_schulz  # noqa: E402

KINDS = ("normal", "five decades", "rank 8", "one large value")
# By number of steps.
SEGMENTS = {
    5: ((5,), (1, 4), (2, 3), (2, 2, 1), (1, 1, 1, 1, 1)),
    3: ((3,), (2, 1), (1, 2), (1, 1, 1)),
}


def matrices(m: int, n: int) -> np.ndarray:
    """[4, m, n] in float64, m <= n: a normal one, and those with the singular values that `KINDS` names."""
    rng = np.random.default_rng(0)
    values = [np.logspace(0, -5, m), np.full(m, 1e-6), np.full(m, 4e-3)]
    values[1][:8], values[2][0] = 1, 1
    found = [rng.normal(size=(m, n))]
    for each in values:
        u, v = (np.linalg.qr(rng.normal(size=(size, m)))[0] for size in (m, n))
        found.append((u * each) @ v.T)
    return np.stack(found)


def wanted(values: np.ndarray, name: str) -> np.ndarray:
    """The polynomials of all steps, in float64, of singular values divided by the norm."""
    steps = newton_schulz.STEPS[name]
    table = np.asarray(newton_schulz.coefficients_of(name, steps), float)
    for terms in np.broadcast_to(table, (steps, table.shape[-1])):
        values = sum(c * values ** (2 * i + 1) for i, c in enumerate(terms))
    return values


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", nargs=2, type=int, default=(192, 512))
    x = matrices(*parser.parse_args().shape)
    u, values, vt = np.linalg.svd(x, full_matrices=False)
    values /= np.linalg.norm(values, axis=1, keepdims=True)
    print(f"{'':42}" + "".join(f"{kind:>24}" for kind in KINDS))
    cases = (
        (name, dtype, segments)
        for name, dtype in itertools.product(newton_schulz.STEPS, ("float16", "bfloat16"))
        for segments in SEGMENTS[newton_schulz.STEPS[name]]
    )
    for name, dtype, segments in cases:
        jax.clear_caches()
        steps = newton_schulz.STEPS[name]
        table = newton_schulz.coefficients_of(name, steps)
        with mock.patch.object(newton_schulz, "_SEGMENTS", {(dtype, table.shape[-1]): segments}):
            y = newton_schulz.orthogonalize(x.astype("float32"), table, dtype, steps=steps)
        y = np.asarray(y, np.float64)
        kept = np.einsum("bji,bjk,bik->bi", u, y, vt)
        line = f"{name:15}{dtype:10}{'+'.join(map(str, segments)):17}"
        for i, want in enumerate(wanted(values, name)):
            error = np.abs(kept[i] - want)[values[i] >= 0.002].max()
            line += f"{np.linalg.norm(y[i], 2) if np.isfinite(y[i]).all() else np.inf:14.4g}"
            line += f"{error:10.3g}"
        print(line, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
