"""The linear layer with quantized products. `swjax` exports the public names.

Read first `algorithm` (the method in 20 lines), then `api`, then `rules` (forward and backward pass),
`products` (the three products), `layer` (what the rules know of a layer and of a matrix, and the quantizers)
and `sharding`. `prologues` are fused with the quantizers. `contraction` and `conversion` serve Flax's layers.
"""
