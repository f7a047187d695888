"""The linear layer with quantized products: the operation, its arithmetic, and its sharding.

`swjax` exports the public names.
"""
