"""What the attacks share: the base class, geometry of the ball, passes of one shape, and attacks
under smoothing.
"""
