"""The annex for networks of integers: ``conversion`` makes one of a trained network.

The rest of the package knows them as ``architectures.integers.NetworkOfIntegers``.
"""
