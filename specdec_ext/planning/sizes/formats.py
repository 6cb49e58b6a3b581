"""``WeightFormat`` and ``OwnFormat``: in how many bits a model stores its matrices."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from specdec_ext.heads.checkpoints.config.fields import Fields, shown
from specdec_ext.models.quantised.convert import quantize_empty
from specdec_ext.models.quantised.saved import METHOD, QuantisedConfig, replace_by_empty


@dataclass(frozen=True)
class WeightFormat:
    """The format of the quantised matrices of a model; everything else is stored in the model's dtype.

    Attributes:
        name: for messages.
        bits: bits per weight, the scales and zero points of groups included.
        unpacks: whether a matrix is converted to the model's dtype for each product.
        kept: parts of the names of modules that are not quantised; embeddings and ``lm_head`` never are.
    """

    name: str
    bits: float
    unpacks: bool
    kept: tuple[str, ...] = ()

    def keeps(self, module: str) -> bool:
        """Whether the module of this name is not quantised."""
        return any(part in module for part in self.kept)


@dataclass(frozen=True)
class OwnFormat:
    """Layers as :func:`specdec_ext.quantize` makes them, each with a layout of its own; for the CPU.

    Attributes:
        name: for messages.
        install: gives these layers to a model on the meta device, in place.
    """

    name: str
    install: Callable[[Any], object]


# Groups of 128 weights share a 16-bit scale and a zero point of 4 bits, as in GPTQ and AWQ files.
_GROUP = 128
FORMATS = {
    "float8": WeightFormat("float8", 8, unpacks=False),
    "int8": WeightFormat("int8", 8, unpacks=True),
    "int4": WeightFormat("int4", 4 + (16 + 4) / _GROUP, unpacks=True),
}
OFFSETS = "offsets"
NAMES = (
    f"auto, none, {', '.join(FORMATS)}, or for the CPU also int4:GROUP and int4:GROUP:{OFFSETS}, such as "
    f"int4:128"
)


def weight_format(
    name: str, config: Mapping[str, Any], where: str, device: str
) -> WeightFormat | OwnFormat | None:
    """Return the format that ``name`` means for a model on a device; None if nothing is quantised.

    Args:
        name: one of ``NAMES``; "auto" reads the ``quantization_config`` of the model. On the CPU, "int8" and
            "int4" are the formats of :func:`specdec_ext.quantize`; elsewhere, those of GPTQ and AWQ.
        config: the model's config.json.
        where: its name in messages.
        device: "cpu" or "cuda".

    Raises:
        ValueError: for an unknown name, a ``quantization_config`` of an unknown method, or a format that the
            device does not compute with.
    """
    found: WeightFormat | OwnFormat | None = None
    weights, *details = name.split(":")
    if name == "auto":
        fields = Fields(config, where).section("quantization_config")
        found = _recorded(fields) if fields.values else None
    elif weights in ("int8", "int4") and (details or device == "cpu"):
        found = _own(name, weights, details)
    elif name in FORMATS:
        found = FORMATS[name]
    elif name != "none":
        raise ValueError(f"quantisation={name!r} is not known; expected {NAMES}")
    if isinstance(found, OwnFormat) and device != "cpu":
        raise ValueError(
            f"{where}: {found.name} is a format for the CPU; pass device='cpu' (--device cpu), or another "
            "quantisation"
        )
    return found


def _own(name: str, weights: str, details: list[str]) -> OwnFormat:
    """The format of a name such as int4:128:offsets."""
    group, *rest = details or [""]
    if (details and not group.isdecimal()) or rest not in ([], [OFFSETS]):
        raise ValueError(f"quantisation={name!r} is not known; expected {NAMES}")
    size = int(group) if group else None
    return OwnFormat(
        name, partial(quantize_empty, weights=weights, group_size=size, symmetric=not rest)
    )


def _saved(config: Fields) -> OwnFormat:
    """The format of a folder that :func:`specdec_ext.quantize` has written."""
    try:
        found = QuantisedConfig.from_dict(dict(config.values))
    except TypeError as error:
        raise ValueError(f"{config.where}: {error}") from error
    found.check()
    bits = sorted({layout["bits"] for layout in found.layouts}, reverse=True)
    name = f"{METHOD}, {' and '.join(map(str, bits))} bits"
    return OwnFormat(name, partial(replace_by_empty, config=found))


def _recorded(config: Fields) -> WeightFormat | OwnFormat:
    """The format that a ``quantization_config`` describes."""
    method = config.text("quant_method") or "bitsandbytes"
    if method == METHOD:
        return _saved(config)
    kept = tuple(
        each
        for name in ("modules_to_not_convert", "llm_int8_skip_modules", "ignored_layers")
        for each in config.texts(name)
    )
    if method in ("gptq", "awq"):
        bits = config.integer("bits", 4, low=2, high=8)
        group = config.values.get("group_size")
        scales = (16 + bits) / group if isinstance(group, int) and group > 0 else 0.0
        return WeightFormat(method, bits + scales, True, kept)
    if method == "bitsandbytes" and config.flag("load_in_4bit", False):
        # Blocks of 64 weights share a float32 scale. Double quantisation stores scales in 8 bits, with a
        # float32 scale for 256 of them (Dettmers et al. 2023, section 3).
        doubled = config.flag("bnb_4bit_use_double_quant", False)
        scales = (8 + 32 / 256) / 64 if doubled else 32 / 64
        return WeightFormat("bitsandbytes, 4 bits", 4 + scales, True, kept)
    if method == "bitsandbytes" and config.flag("load_in_8bit", False):
        return WeightFormat("bitsandbytes, 8 bits", 8, True, kept)
    if method in ("fp8", "fbgemm_fp8"):
        return WeightFormat(method, 8, False, kept)
    if method == "mxfp4":  # blocks of 32 weights share a scale of 8 bits
        return WeightFormat(method, 4 + 8 / 32, False, kept)
    raise ValueError(
        f"{config.where}: quant_method is {shown(method)}, whose size is not known; pass quantisation= one "
        f"of {', '.join(FORMATS)}, or 'none' for the size without it"
    )
