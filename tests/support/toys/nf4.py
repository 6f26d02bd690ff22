"""Linear layers with the attributes of bitsandbytes' 4-bit layers: a parameter that carries a state
of quantisation, with scales that are quantised again (``state2``).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

BLOCK = 16


class QuantState:
    def __init__(self, absmax, code, offset=None, state2=None):
        self.absmax = absmax
        self.code = code
        self.offset = offset
        self.state2 = state2


class Params4bit(nn.Parameter):
    def __new__(cls, data, quant_state, module):
        made = torch.Tensor._make_subclass(cls, data, False)
        made.quant_state = quant_state
        made.module = module
        return made

    def __deepcopy__(self, memo):
        raise NotImplementedError("its module is not copied with it")


class Linear4bit(nn.Linear):
    per_token = True

    @classmethod
    def of(cls, linear):
        """Return a layer with the weights of ``linear``, rounded to 16 values per block."""
        made = cls(linear.in_features, linear.out_features, linear.bias is not None, "meta")
        made.bias = linear.bias
        blocks = linear.weight.detach().view(-1, BLOCK)
        scales = blocks.abs().amax(1)
        offset = scales.mean()
        limit = (scales - offset).abs().amax()
        state2 = QuantState(limit[None], torch.linspace(-1, 1, 256))
        codes = _nearest((scales - offset) / limit, state2.code)
        state = QuantState(codes.byte(), torch.linspace(-1, 1, 16), offset, state2)
        nibbles = _nearest(blocks / _scales(state)[:, None], state.code).view(-1, 2)
        packed = (16 * nibbles[:, :1] + nibbles[:, 1:]).byte()
        made.weight = Params4bit(packed, state, made)
        made.quant_state = state
        return made

    def dequantised(self):
        state = self.weight.quant_state
        packed = self.weight.data
        nibbles = torch.cat((packed >> 4, packed & 15), 1).view(-1, BLOCK)
        values = state.code[nibbles.int()] * _scales(state)[:, None]
        return values.view(self.out_features, self.in_features)

    def forward(self, x):
        return F.linear(x, self.dequantised().to(x.dtype), self.bias)


def _scales(state):
    inner = state.state2
    return inner.code[state.absmax.int()] * inner.absmax + state.offset


def _nearest(values, code):
    return (values[..., None] - code).abs().argmin(-1)


def quantise_to_nf4(model):
    """Replace the linear layers of a model's decoder layers."""
    for module in model.model.layers.modules():
        for name, linear in list(module.named_children()):
            if type(linear) is nn.Linear:
                setattr(module, name, Linear4bit.of(linear))
