"""The fast path of a CPU in float32: products and attention in C++, and the model compiled around them.

All of it is here, and only the executor imports it: without a C++ compiler, or with the backend "torch",
PyTorch does the same.
"""
