"""Initial states for selective scans (Mamba-1).

The scan that a Mamba-1 mixer runs over several tokens (``selective_scan_fn`` of mamba_ssm, and transformers'
fallback for it) starts from zero: behind cached tokens the mixer forgets its state without a word. But

    h_t = exp(dt_t A) h_{t-1} + dt_t B_t x_t,    y_t = C_t h_t

(Mamba, arXiv 2312.00752, section 3.2) is linear in h, so what the initial state h_0 adds to it decays on its
own: ``exp(A (dt_1 + ... + dt_t)) h_0``. That is put on top of whatever implementation of the scan is in use.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn

from specdec_ext.target.replaced import replaced_forward

SCAN = "mamba_selective_scan"
# Initial states of the scans that the mixer under way will run, one per head of its own scan.
_initial: ContextVar[Iterator[Tensor] | None] = ContextVar("specdec_scan_states", default=None)
_ours: set[Callable] = set()
_lock = threading.Lock()


def stateless_scans(model: nn.Module) -> list[nn.Module]:
    """The mixers of a model whose scans start from zero.

    What tells them from Mamba-2's, whose scan takes an initial state, is that ``dt``, ``B`` and ``C`` are
    projected from the convolved input (``x_proj``).
    """
    return [
        module
        for module in model.modules()
        if hasattr(module, "A_log")
        and (hasattr(module, "x_proj") or hasattr(module, "x_proj_weight"))
    ]


def can_continue(mixer: nn.Module) -> bool:
    """Whether the scan of this mixer is where :func:`continuing` finds it (transformers >= 5.15)."""
    return hasattr(sys.modules[type(mixer).__module__], SCAN)


def continuing(mixers: Sequence[nn.Module]) -> AbstractContextManager[None]:
    """Let the scans of these modules start from the cached states, in this thread."""
    for name in {type(mixer).__module__ for mixer in mixers}:
        _wrap_scan(sys.modules[name])
    return replaced_forward(mixers, _continue)


def _wrap_scan(module: Any) -> None:
    with _lock:  # wrapped twice, it would add the states twice
        if getattr(module, SCAN) not in _ours:
            setattr(module, SCAN, _with_initial_state(getattr(module, SCAN)))


def _continue(
    mixer: Any,
    forward: Callable[..., Tensor],
    hidden_states: Tensor,
    cache_params: Any,
    *args: Any,
    **kwargs: Any,
) -> Tensor:
    state = cache_params.layers[mixer.layer_idx].recurrent_states[0]
    if hidden_states.shape[1] == 1 or state is None:
        return forward(hidden_states, cache_params, *args, **kwargs)
    # Zamba's mixers scan head by head: [rows, heads, channels, state] instead of [rows, channels, state].
    token = _initial.set(iter(state.unbind(1) if state.ndim == 4 else [state]))
    try:
        return forward(hidden_states, cache_params, *args, **kwargs)
    finally:
        _initial.reset(token)


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

    _ours.add(selective_scan)
    return selective_scan
