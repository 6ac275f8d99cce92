"""Logs and their manifests: their columns, how they are written, read and judged. No torch."""
