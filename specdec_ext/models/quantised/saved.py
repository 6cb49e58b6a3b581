"""How quantised models are saved and loaded: as a quantisation method of transformers.

``config.json`` lists the layers that have codes, and the files of weights hold the codes and scales.
``from_pretrained`` knows the method once this module was imported, as ``from specdec_ext import quantize``
does.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D
from transformers.quantizers import HfQuantizer, register_quantization_config, register_quantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from specdec_ext.heads.checkpoints.config.fields import shown
from specdec_ext.models.quantised.linear import QuantisedLinear
from specdec_ext.ops.quantise import CODE_BLOCK, QuantisedWeight

METHOD = "specdec_ext"
VERSION = 1  # of the codes' order and of the fields of a layout

_SCALES = ("float32", "bfloat16", "offsets")


@register_quantization_config(METHOD)
@dataclass
class QuantisedConfig(QuantizationConfigMixin):
    """The ``quantization_config`` of a model with quantised layers.

    Attributes:
        layouts: dicts with the names of ``layers`` that have the same number of ``bits``, the same
            ``group_size`` (None for whole rows) and ``scales``: "float32", "bfloat16", or "offsets" for pairs
            of float32 numbers; and with ``levels`` that their codes stand for, or not.
        version: version of the format.
    """

    layouts: list[dict[str, Any]] = field(default_factory=list)
    version: int = VERSION
    quant_method: str = METHOD  # type: ignore[assignment]  # transformers lists its own methods

    @classmethod
    def of(cls, model: nn.Module) -> QuantisedConfig:
        layouts: dict[tuple[Any, ...], list[str]] = {}
        for name, module in model.named_modules():
            if isinstance(module, QuantisedLinear):
                weight = module.weight
                size = weight.group_size if weight.group_size < weight.ins else None
                kind = scales_kind(weight.scales.dtype, weight.scales.ndim == 3)
                layout = (weight.bits, size, kind, weight.levels is not None)
                layouts.setdefault(layout, []).append(name)
        return cls(
            layouts=[
                dict(bits=bits, group_size=size, scales=kind, levels=levels, layers=names)
                for (bits, size, kind, levels), names in layouts.items()
            ]
        )

    def check(self) -> None:
        """
        Raises:
            ValueError: if a field has a value that this version of the package does not write.
        """
        where = "quantization_config"
        if self.version != VERSION:
            raise ValueError(
                f"{where}.version is {self.version!r}; this version of specdec_ext reads {VERSION}. Quantise "
                "the model again"
            )
        if not isinstance(self.layouts, list):
            raise ValueError(f"{where}.layouts is {shown(self.layouts)}; expected a list")
        for layout in self.layouts:
            size = layout.get("group_size") if isinstance(layout, dict) else None
            known = (
                isinstance(layout, dict)
                and layout.get("bits") in (8, 4)
                and (size is None or (isinstance(size, int) and size > 0))
                and layout.get("scales") in _SCALES
                and layout.get("levels") in (False, layout.get("bits") == 4)
                and isinstance(layout.get("layers"), list)
            )
            if not known:
                raise ValueError(
                    f"{where}.layouts has {shown(layout)}; expected bits 8 or 4, a group_size, scales "
                    f"{', '.join(_SCALES)}, levels false or, for 4 bits, true, and layers"
                )


@register_quantizer(METHOD)
class Quantiser(HfQuantizer):
    """Loads and saves the layers that a :class:`QuantisedConfig` lists."""

    requires_calibration = True  # only models that are quantised already are loaded
    quantization_config: QuantisedConfig

    def _process_model_before_weight_loading(self, model: PreTrainedModel, **_: Any) -> None:
        layers = replace_by_empty(model, self.quantization_config)
        self._expected = {name: _shapes(layer) for name, layer in layers.items()}

    def _process_model_after_weight_loading(self, model: PreTrainedModel, **_: Any) -> None:
        """Compare shapes, as some versions of transformers do not for quantised layers."""
        for name, expected in self._expected.items():
            found = _shapes(model.get_submodule(name))
            if found != expected:
                raise ValueError(
                    f"{name} has tensors of the shapes {found}; expected {expected}. The file is damaged or "
                    "belongs to another model"
                )

    def is_serializable(self, **_: Any) -> bool:
        return True

    @property
    def is_trainable(self) -> bool:
        return False


def replace_by_empty(model: PreTrainedModel, config: QuantisedConfig) -> dict[str, QuantisedLinear]:
    """Replace the layers of a config by those whose tensors are on the meta device, and return them by name.

    Raises:
        ValueError: if the config is not one that this package writes, or belongs to another model.
    """
    config.check()
    names, layers = names_of(model), {}
    for layout in config.layouts:
        for name in layout["layers"]:
            module = _linear(model, name)
            layers[name] = _empty(module, layout)
            replace(model, names[id(module)], layers[name])
    return layers


def scales_kind(dtype: torch.dtype, offsets: bool) -> str:
    """What a layout calls the scales of this dtype, with offsets or without."""
    return "offsets" if offsets else str(dtype).removeprefix("torch.")


def mark_as_quantised(model: PreTrainedModel) -> None:
    """Make ``save_pretrained`` record which layers have codes."""
    config = QuantisedConfig.of(model)
    model.config.quantization_config = config
    vars(model).update(hf_quantizer=Quantiser(config), quantization_method=METHOD)


def names_of(model: nn.Module) -> dict[int, list[str]]:
    """All names of each module, by its id. A module may occur in several places."""
    found: dict[int, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        found.setdefault(id(module), []).append(name)
    return found


def replace(model: PreTrainedModel, names: list[str], by: nn.Module) -> None:
    """Replace the module of these names. Parameters that are tied to its own are tied no longer."""
    by.eval()
    for name in names:
        parent, _, last = name.rpartition(".")
        model.get_submodule(parent)._modules[last] = by
    tied: dict[str, str] = model.all_tied_weights_keys
    for pair in list(tied.items()):
        if any(each.startswith(f"{name}.") for each in pair for name in names):
            del tied[pair[0]]
            if not tied:
                model.config.get_text_config(decoder=True).tie_word_embeddings = False
                model.config.tie_word_embeddings = False


def _linear(model: PreTrainedModel, name: Any) -> Any:
    try:
        module = model.get_submodule(name)
    except (AttributeError, TypeError):
        module = None
    if type(module) not in (nn.Linear, Conv1D):
        raise ValueError(
            f"quantization_config.layouts names {name!r}, which is no linear layer of {type(model).__name__}"
        )
    return module


def _shapes(layer: nn.Module) -> dict[str, list[int]]:
    return {name: [*tensor.shape] for name, tensor in layer.named_buffers()}


def _empty(module: Any, layout: dict[str, Any]) -> QuantisedLinear:
    """A layer of this layout whose tensors, on the meta device, are yet to be loaded."""
    outs, ins = module.weight.shape[:: -1 if isinstance(module, Conv1D) else 1]
    groups = -(-ins // (layout["group_size"] or ins))
    device = torch.device("meta")
    dtype = torch.bfloat16 if layout["scales"] == "bfloat16" else torch.float32
    pair = (2,) if layout["scales"] == "offsets" else ()
    width = ins if layout["bits"] == 8 else -(-ins // CODE_BLOCK) * CODE_BLOCK // 2
    codes = torch.empty(
        outs, width, dtype=torch.int8 if layout["bits"] == 8 else torch.uint8, device=device
    )
    scales = torch.empty(outs, groups, *pair, dtype=dtype, device=device)
    levels = torch.empty(16, dtype=torch.float32, device=device) if layout["levels"] else None
    return QuantisedLinear(QuantisedWeight(codes, scales, ins, levels), module.bias)
