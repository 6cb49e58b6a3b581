"""``weight_of``: the weight of a linear layer, whichever library has quantised it.

Only weight-only formats are read. A layer that quantises its input as well (torchao's dynamic activation
quantisation, LLM.int8(), W8A8 of compressed-tensors) has another output than any matrix of weights gives, so
it computes itself. Layers are recognised by the names of their classes, so no library is imported.
"""

from __future__ import annotations

from torch import Tensor, nn

from specdec_ext.models.quantised.kept import kept
from specdec_ext.models.quantised.linear import QuantisedLinear
from specdec_ext.models.quantised.sources import (
    bitsandbytes,
    compressed_tensors,
    gptqmodel,
    torchao,
)
from specdec_ext.ops.quantise import QuantisedWeight

_LIBRARIES = {"bitsandbytes", "gptqmodel", "torchao"}  # whose classes make modules or tensors
_READERS = (torchao.read, compressed_tensors.read, gptqmodel.read, bitsandbytes.read)


def is_foreign(module: nn.Module) -> bool:
    """Whether a library of this folder has quantised a module."""
    made = (type(module), *map(type, module._parameters.values()))
    return (
        any(each.__module__.partition(".")[0] in _LIBRARIES for each in made)
        or getattr(module, "quantization_scheme", None) is not None
    )


def weight_of(module: nn.Module) -> Tensor | QuantisedWeight | None:
    """Return the weight ``[out_features, in_features]`` that a linear layer multiplies its input with.

    The codes of another library are brought into the order of :class:`QuantisedWeight` once, as long as the
    tensors of the layer stay as they are. Codes of 8 bits that are in this order already are not copied. A
    copy is freed with the layer.

    Returns:
        The parameter of a plain ``nn.Linear``, the codes of a quantised layer, and None for everything else:
        other modules, layers that quantise their input, unknown formats, and tensors whose shapes or numbers
        do not fit together.
    """
    if isinstance(module, QuantisedLinear):
        return module.weight
    for read in _READERS:
        source = read(module)
        if source is not None:
            return kept(module, source.tensors, source.weight)
    weight = module._parameters.get("weight")
    plain = type(module) is nn.Linear and type(weight) is nn.Parameter and not is_foreign(module)
    return weight if plain else None
