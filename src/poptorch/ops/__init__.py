"""Ops of our own that programs put into a graph: each is an op of torch, with what it computes and its derivative.

To add one, write a module like `ctc.py`: a `torch.library.custom_op` in the namespace `poptorch`, a function that
describes its results (`register_fake`), its derivative (`register_autograd`), and the function that `forward` calls.
"""
