"""Tolerances of the tests: signal-to-noise ratios derived from the dtype and the length of the sum."""

import numpy as np

EPS = {"float32": 2.0**-24, "bfloat16": 2.0**-9, "float16": 2.0**-12}

# Lowest SNR in dB against float64 of every kernel, by the dtype of the result: the error of rounding to that
# dtype, and for fp32 that of a sum of 5,120 products, with a margin of 6 dB as in `floor_db`.
FLOOR_DB = {"float32": 100, "float16": 66, "bfloat16": 48}
# fp8 tensor cores accumulate with fewer bits than fp32 has (Hopper: 14). Quantization to fp8 alone has an SNR
# of 24 to 28 dB, so this loss is small.
FP8_SUM_DB = 40


def snr_db(value, reference) -> float:
    """Returns the signal-to-noise ratio in dB: 20 dB are a factor of ten in relative error; 400 if equal."""
    value, reference = np.asarray(value, np.float64), np.asarray(reference, np.float64)
    assert value.shape == reference.shape, (value.shape, reference.shape)
    assert np.isfinite(value).all(), "a value is not finite"
    if np.array_equal(value, reference):
        return 400.0
    noise, signal = np.sum((value - reference) ** 2), np.sum(reference**2)
    return 10 * np.log10(max(signal, 1e-300) / max(noise, signal * 1e-40, 1e-300))


def floor_db(dtype: str, k: int) -> float:
    """Returns the lowest SNR in dB of a sum of k products, accumulated in fp32 and rounded to `dtype`.

    The rounding error is uniform in +-eps of each value; sums in fp32 add eps32 * sqrt(k). A margin of 6 dB
    allows for both being estimates.
    """
    noise = EPS[dtype] + EPS["float32"] * np.sqrt(max(k, 1))
    return -20 * np.log10(noise) - 6
