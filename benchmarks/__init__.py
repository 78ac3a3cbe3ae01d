"""Benchmarks of poptorch against eager PyTorch, `torch.compile` and JAX: run `python -m benchmarks --help`."""
