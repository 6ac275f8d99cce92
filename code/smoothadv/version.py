"""The version of this package: its only statement."""

__version__ = "0.1.0"
