"""LayerNorm and RMSNorm of rows: the specification on blocks of them."""

from swjax.kernels.norms import reference
from swjax.kernels.pallas_tpu import rows

layer_norm = rows.by_specification("layer_norm", reference.layer_norm)
rms_norm = rows.by_specification("rms_norm", reference.rms_norm)

WHY_NOT = dict.fromkeys(("layer_norm", "rms_norm"), rows.why_not_quantizing)
