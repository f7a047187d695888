"""Quantizers: by row, channel or tensor, with maxima that are computed or known."""
