"""Trains a classifier for any objective: fast, on one GPU or many, and resumable at every step."""
