"""Makes networks of integers of trained ones: reading.py reads a float network, building.py builds
that of integers.

calibration.py chooses the ranges of values, request.py carries out what the command ``quantize`` is
asked for.
"""
