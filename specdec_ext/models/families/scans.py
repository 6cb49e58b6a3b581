"""Initial states for selective scans (Mamba-1).

The scan that a Mamba-1 mixer runs over several tokens (``selective_scan_fn`` of mamba_ssm, and transformers'
fallback for it) starts from zero, so after cached tokens the mixer silently ignores its state. But

    h_t = exp(dt_t A) h_{t-1} + dt_t B_t x_t,    y_t = C_t h_t

(Mamba, arXiv 2312.00752, section 3.2) is linear in h, so the contribution of the initial state h_0 to h_t is
separate: ``exp(A (dt_1 + ... + dt_t)) h_0``. It is added to the result of any implementation of the scan.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from specdec_ext.models.compat import cache_of
from specdec_ext.models.patching.arguments import bound_arguments
from specdec_ext.models.patching.changes import binding, joined_changes
from specdec_ext.models.patching.forwards import replaced_forward

SCAN = "mamba_selective_scan"
# Initial states of the scans that the current mixer runs: one, or one per head.
_initial: ContextVar[Iterator[Tensor] | None] = ContextVar("specdec_scan_states", default=None)


def stateless_scans(model: nn.Module) -> list[nn.Module]:
    """Return the mixers of a model whose scans start from zero.

    They project ``dt``, ``B`` and ``C`` from the convolved input (``x_proj``). The mixers of Mamba-2, whose
    scan takes an initial state, do not.
    """
    return [
        module
        for module in model.modules()
        if hasattr(module, "A_log")
        and (hasattr(module, "x_proj") or hasattr(module, "x_proj_weight"))
    ]


def can_continue(mixer: nn.Module) -> bool:
    """Whether :func:`continuing` can patch the scan of this mixer (transformers >= 5.15)."""
    return hasattr(sys.modules[type(mixer).__module__], SCAN)


@contextmanager
def continuing(mixers: Sequence[nn.Module]) -> Iterator[None]:
    """Make the scans of these modules start from the cached states, in this thread."""
    modules = {type(mixer).__module__ for mixer in mixers}
    with joined_changes() as changes, replaced_forward(mixers, _continue):
        changes.patch(
            (continuing, frozenset(modules)),
            lambda: [(vars(sys.modules[name]), SCAN, _with_initial_state) for name in modules],
        )
        yield


def _continue(
    mixer: Any,
    forward: Callable[..., Tensor],
    *args: Any,
    **kwargs: Any,
) -> Tensor:
    given = bound_arguments(mixer, args, kwargs).arguments
    state = cache_of(given).layers[mixer.layer_idx].recurrent_states[0]
    if given["hidden_states"].shape[1] == 1 or state is None:
        return forward(*args, **kwargs)
    # Zamba's mixers scan head by head: [rows, heads, channels, state] instead of [rows, channels, state].
    with binding(_initial, iter(state.unbind(1) if state.ndim == 4 else [state])):
        return forward(*args, **kwargs)


@cache
def _with_initial_state(scan: Callable[..., Any]) -> Callable[..., Any]:
    def selective_scan(
        x: Tensor,
        dt: Tensor,
        A: Tensor,
        B: Tensor,
        C: Tensor,
        *args: Any,
        z: Tensor | None = None,
        delta_bias: Tensor | None = None,
        delta_softplus: bool = False,
        return_last_state: bool = False,
        **kwargs: Any,
    ) -> Any:
        """``x, dt, z [rows, channels, tokens]``, ``A [channels, state]``, ``B, C [rows, state, tokens]``."""
        result = scan(
            x,
            dt,
            A,
            B,
            C,
            *args,
            z=z,
            delta_bias=delta_bias,
            delta_softplus=delta_softplus,
            return_last_state=return_last_state,
            **kwargs,
        )
        states = _initial.get()
        if states is None:
            return result
        out = result[0] if return_last_state else result
        steps = dt.float() if delta_bias is None else dt.float() + delta_bias.float()[:, None]
        if delta_softplus:
            steps = nn.functional.softplus(steps)
        decay = torch.exp(A.float()[:, None] * steps.cumsum(dim=-1)[..., None])
        carried = decay * next(states).float()[:, :, None]  # [rows, channels, tokens, state]
        added = torch.einsum("rcts,rst->rct", carried, C.float())
        if z is not None:
            added = added * nn.functional.silu(z.float())
        out = out + added.to(out.dtype)
        if not return_last_state:
            return out
        return out, result[1] + carried[:, :, -1].to(result[1].dtype)

    return selective_scan
