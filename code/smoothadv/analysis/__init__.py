"""From logs to numbers, tables and figures; one table or figure per file. Reads records, never imports torch.

An analysis is a frozen dataclass registered in ``ANALYSES``; its settings become options of
``analyze NAME``. Calling it with a list of ``logs.CertificationLog`` returns a ``tables.Table`` or a
matplotlib Figure.
"""

from __future__ import annotations

from smoothadv.registry import Registry, discover

ANALYSES: Registry[type] = Registry("analysis")

discover(__name__, __path__)
