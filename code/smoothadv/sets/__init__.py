"""The annex for conformal sets: classes among which the label is for most images, attacked or not.

``coverage`` has the mathematics, ``scores`` the log, ``scoring`` makes it.
"""
