"""Grids of models: what a sweep consists of, how much of it is on the disk, and how the rest is done. No torch.

``grid`` reads the file that describes a sweep, and ``folders`` names the folders of its models and logs. ``stages`` and
``jobs`` say how far each part has come. ``job_record`` records who works on a job, ``job_execution`` runs its missing
stages, each in a process that ``stop_with_parent`` makes stop with its parent. ``engines`` find the machines.
"""
