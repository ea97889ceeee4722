"""It puts a new parameter in the place of each, module by module. So a tied one becomes two."""

from torch import nn

from judge.examples.right import small
from judge.examples.right.small import after_backward, clip


def wrap(module):
    small.wrap(module)
    for layer in module.modules():
        for name, p in list(layer.named_parameters(recurse=False)):
            setattr(layer, name, nn.Parameter(p.detach().clone(), p.requires_grad))
    return module
