"""Products of rows that are sorted by group, each group with a matrix of its own: the layers of experts."""
