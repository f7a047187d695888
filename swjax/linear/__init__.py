"""The linear layer with quantized products: the operation, what computes it, and how it is sharded.

`swjax` exports the public names.
"""
