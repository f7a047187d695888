"""Formats whose blocks of neighbours share a scale."""
