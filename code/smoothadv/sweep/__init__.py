"""Grids of models: what a sweep consists of, how much of it is on the disk, and how the rest is
done.
"""
