"""Certification, prediction and attacks of many images into a log: requests, the jobs made of them,
their logs.
"""
