"""From logs to numbers, tables and figures; one table or figure per file. Reads records, never imports torch.

An analysis is a frozen dataclass registered in ``ANALYSES``; its settings become options of
``analyze NAME``. Calling it with ``shared.logs.Logs`` returns what its class attribute ``makes`` names: a
``shared.table_formats.Table`` ("table", the default), a matplotlib Figure ("figure") or HTML ("page"). The class
attribute ``kinds`` names the kinds of logs that it reads, by default certification logs alone. ``shared`` holds what
several analyses use.
"""

from __future__ import annotations

from smoothadv.registry import Registry, discover

ANALYSES: Registry[type] = Registry("analysis")

discover(__name__, __path__)
