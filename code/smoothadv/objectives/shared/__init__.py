"""What objectives share: the attack of SmoothAdv, and the weight of a second term."""
