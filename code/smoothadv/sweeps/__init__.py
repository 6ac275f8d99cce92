"""Grids of models: what a sweep consists of, what of it is on the disk, and how the rest gets done. No torch.

``grid`` reads the file that describes a sweep, ``folders`` names what it makes, ``stages`` and ``jobs`` are its parts
and how far each has come, ``records`` remembers who works on a job, ``execution`` brings one to its end, ``engines``
find the machines.
"""
