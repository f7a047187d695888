"""The names of metrics that are written in one module and read in another."""

RMS = "stability/rms/"  # followed by the parameter's path
SKIPPED = "stability/skipped/"  # followed by the parameter's path
FEATURE_MEAN, FEATURE_MAX = "feature_mean_abs", "feature_max_abs"  # of |x|, over all elements
FEATURES = f"stability/{FEATURE_MEAN}/"  # followed by the tower, or the module's path
