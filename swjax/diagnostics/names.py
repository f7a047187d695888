"""The names of metrics that are written in one module and read in another."""

RMS = "stability/rms/"  # followed by the parameter's path
SKIPPED = "stability/skipped/"  # followed by the parameter's path
FEATURE_MEAN, FEATURE_MAX = "feature_mean_abs", "feature_max_abs"  # of |x|, over all elements
FEATURES = f"stability/{FEATURE_MEAN}/"  # followed by the tower, or the module's path
# The last part of the names of quantization health: the operands of y = x w, g of dx = g wT, and those of
# dw = xT g if the recipe quantizes that product.
OPERANDS = ("x", "w", "g", "wgrad_x", "wgrad_g")
