"""``traces``: the global state that a call changes temporarily, to be compared before and after it."""

from __future__ import annotations

import contextvars
import sys

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from specdec_ext.models.families.scans import SCAN
from specdec_ext.models.patching import changes


def traces(model: PreTrainedModel) -> dict:
    modules = list(model.modules())
    registries = (ALL_ATTENTION_FUNCTIONS, ALL_MASK_ATTENTION_FUNCTIONS)
    sources = [sys.modules[name] for name in sorted({type(each).__module__ for each in modules})]
    return {
        "attributes": [sorted(vars(module)) for module in modules],
        "forwards": [vars(module).get("forward") for module in modules],
        "hooks": [_hooks(module) for module in modules],
        "registries": [(dict(r._local_mapping), dict(r._global_mapping)) for r in registries],
        "scans": [getattr(source, SCAN, None) for source in sources],
        "context": dict(contextvars.copy_context().items()),
        "modes": (torch.is_inference_mode_enabled(), torch.is_grad_enabled(),
            torch.is_autocast_enabled("cpu"), model.training),
        "configs": (model.config.to_dict(), model.generation_config.to_dict()),
        "threads": torch.get_num_threads(),
        "patches": (dict(changes._patches), dict(changes._lock._owner), list(changes._left_behind)),
    }  # fmt: skip


def _hooks(module: nn.Module) -> dict:
    """All hooks of a module except those that transformers never removes."""
    return {
        name: [hook for hook in hooks.values() if "output_capturing" not in str(hook)]
        for name, hooks in vars(module).items()
        if name.endswith("_hooks") and isinstance(hooks, dict)
    }
