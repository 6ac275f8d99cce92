"""Engines find machines for jobs, one engine per file. They only schedule: the files on the disk decide what is done.

An engine is a frozen dataclass derived from ``Engine``, registered in ``ENGINES``; its settings become
options of ``sweep run``, and of ``sweep retry``.
"""

from smoothadv.registry import Registry, discover
from smoothadv.sweeps.engines.engine import Engine

ENGINES: Registry[type[Engine]] = Registry("engine")
discover(__name__, __path__)
