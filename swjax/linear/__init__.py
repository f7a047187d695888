"""The linear layer with quantized products. `swjax` exports the public names.

Read first `algorithm` (the method in 20 lines), then `api`, then `rules` (forward and backward pass),
`products` (the three products), `layer` (static description of a layer, representations of its arrays, and
the quantizers) and `sharding`. `prologues` are fused with the quantizers. `ragged`, `ragged_rules` and
`experts` are the same for layers of experts. `contraction` and `conversion` serve Flax's layers; `program`,
with its plan, run and report, converts any other function.
"""
