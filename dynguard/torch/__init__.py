"""What needs torch: the gradient source, statistics and, later, recovery, curvature and precision."""
