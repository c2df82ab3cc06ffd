"""Triton kernels over a paged KV cache, and the plain PyTorch that they are held against."""
