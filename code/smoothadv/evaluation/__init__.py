"""Certification, prediction and attacks of many images into a log: specifications, the evaluations
prepared from them, their logs.
"""
