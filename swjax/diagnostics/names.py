"""The names of metrics that are written in one module and read in another."""

RMS = "stability/rms/"  # followed by the parameter's path
SKIPPED = "stability/skipped/"  # followed by the parameter's path
FEATURE_MEAN, FEATURE_MAX = "feature_mean_abs", "feature_max_abs"  # mean and maximum of |x|
FEATURES = f"stability/{FEATURE_MEAN}/"  # followed by the tower, or the module's path
# Last part of the names of quantization metrics: the operands of y = x w, g of dx = g wT, and the operands of
# dw = xT g if the recipe quantizes that product.
OPERANDS = ("x", "w", "g", "wgrad_x", "wgrad_g")
