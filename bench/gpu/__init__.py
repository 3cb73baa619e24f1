"""GPU benchmarks: models, kernels, recomputation, estimates and a profile, in one run."""
