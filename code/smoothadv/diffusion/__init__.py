"""Diffusion models before a classifier (Carlini et al., 2023)."""
