"""Training: the loop, its steps, its records."""
