"""What the analyses share: finding and reading logs, hyper-parameters, statistics, tables and the
style of figures.
"""
