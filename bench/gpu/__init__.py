"""What a GPU makes of it: models, kernels, recomputation, estimates and a profile, in one run."""
