"""The smoothed classifier at work: the base classifier arranged to vote fast, and the counting of
its votes.
"""
