"""StableAdamW in float64 NumPy, one tensor at a time: the paper's Algorithm 2, and wrong readings of it."""

import numpy as np

WRONG_READINGS = (
    "clips the RMS of the update",
    "RMS from the previous v",
    "one RMS for a stack",
    "RMS of a local shard",
    "v + eps^2",
    "inverted clip",
    "decay at the unclipped rate",
    "moments not debiased",
    "moments debiased twice",
    "schedule one step ahead",
)


def run(params, grads, rates, *, b1, b2, eps, decay, threshold=1.0, stacked=(), reading=""):
    """Trains for len(grads) steps.

    Args:
      params: {name: array}.
      grads: for each step {name: array}.
      rates: learning rate of each step, and one more.
      decay: {name: weight decay}.
      stacked: names whose leading axis enumerates tensors.
      reading: "" or one of `WRONG_READINGS`.

    Returns:
      params, m, v, rms after the last step, each {name: array}.
    """
    out = [dict() for _ in range(4)]
    for name, p in params.items():
        steps = [g[name] for g in grads]
        if name in stacked and reading != "one RMS for a stack":
            layers = range(p.shape[0])
            ends = [
                one(
                    p[i], [g[i] for g in steps], rates, b1, b2, eps, decay[name], threshold, reading
                )
                for i in layers
            ]
            end = [np.stack([e[k] for e in ends]) for k in range(4)]
        else:
            end = one(p, steps, rates, b1, b2, eps, decay[name], threshold, reading)
        for k in range(4):
            out[k][name] = end[k]
    return tuple(out)


def one(p, grads, rates, beta1, beta2, eps, lam, d, reading):
    """Does what `run` does, for one tensor."""
    wide = complex if np.iscomplexobj(p) else float
    p = np.array(p, wide)
    m, v, rms = np.zeros(p.shape, wide), np.zeros(p.shape, float), 0.0
    for t, g in enumerate(grads, start=1):
        g = np.array(g, wide)
        b1 = beta1 * (1 - beta1 ** (t - 1)) / (1 - beta1**t)
        b2 = beta2 * (1 - beta2 ** (t - 1)) / (1 - beta2**t)
        if reading in ("moments not debiased", "moments debiased twice"):
            b1, b2 = (beta1, beta2) if reading == "moments not debiased" else (b1, b2)
        previous = v
        m = b1 * m + (1 - b1) * g
        v = b2 * v + (1 - b2) * np.abs(g) ** 2

        seen = previous if reading == "RMS from the previous v" else v
        floor = seen + eps**2 if reading == "v + eps^2" else np.maximum(seen, eps**2)
        ratio = np.abs(g) ** 2 / floor
        if reading == "RMS of a local shard" and ratio.ndim:
            ratio = ratio[: max(1, len(ratio) // 2)]
        rms = np.sqrt(np.mean(ratio)) if ratio.size else 0.0

        m_hat, v_hat = m, v
        if reading == "moments debiased twice":
            m_hat, v_hat = m / (1 - beta1**t), v / (1 - beta2**t)
        step = m_hat / (np.sqrt(v_hat) + eps)
        lr = rates[t] if reading == "schedule one step ahead" else rates[t - 1]
        clip = max(1.0, rms / d)
        if reading == "inverted clip":
            clip = min(1.0, rms / d)
        if reading == "clips the RMS of the update":
            clip = max(1.0, np.sqrt(np.mean(np.abs(step) ** 2)) / d)
        eta = lr / clip
        decay_rate = lr if reading == "decay at the unclipped rate" else eta
        p = p - decay_rate * lam * p - eta * step
    return p, m, v, rms
