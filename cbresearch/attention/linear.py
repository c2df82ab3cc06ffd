"""Linear layers of a transformers model in C++, beside its attention."""

import torch
from torch import Tensor, nn

from cbresearch.kernels import native


class PackedLinear(nn.Module):
    """A linear layer whose weights lie in the order in which the C++ product reads them."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.out_features = linear.out_features
        self.panels = native.pack(linear.weight)
        self.bias = linear.bias

    def forward(self, x: Tensor) -> Tensor:
        """Return the outputs `[..., out_features]`."""
        return torch.ops.cbresearch.native_linear(x, self.panels, self.bias, self.out_features)


def pack_linear_layers(model: nn.Module) -> None:
    """Replace each plain linear layer of a model by one with packed weights, in place."""
    for module in list(model.modules()):
        for name, child in module.named_children():
            # A subclass may compute something else.
            if type(child) is nn.Linear:
                setattr(module, name, PackedLinear(child))
