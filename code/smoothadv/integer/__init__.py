"""The annex for networks of integers: ``conversion`` makes one of a trained network.

The other parts know them as ``architectures.integers.NetworkOfIntegers``.
"""
