"""Tensors in, tensors out: the operations a serving step is made of.

``kernels.ops`` is the public surface; ``kernels.metadata`` describes a batch. Nothing here knows
models, requests or adapters' names.
"""
