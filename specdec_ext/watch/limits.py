"""``Limits``: when a server is not well. ``deploy/prometheus/rules.yml`` has the same limits.

Drafts of one text are alike: a text that is easy to guess is easy to guess to its end. So the shares of
accepted drafts scatter more than those of independent draws. The variance is larger by the *design effect*
(Kish, Survey Sampling, 1965), which is ``1 + (m - 1) * rho`` for m drafts per text whose correlation is rho.
"""

from __future__ import annotations

from dataclasses import dataclass

from specdec_ext.stats import ALARM_SHARE, ALARM_WINDOW


@dataclass(frozen=True)
class Limits:
    """The limits of all checks.

    Attributes:
        window_seconds: the time over which counters are compared.
        dead_head_drafts: drafts after which a head may be called dead.
        dead_head_share: smallest share of accepted first tokens of a head that is not dead.
        drift_drafts: drafts that reach a position before its acceptance is compared with the reference.
        drift_tolerance: drop of an acceptance that is no drift, because traffic changes: a share of drafts.
        drift_errors: standard errors of the drop that are put down to chance.
        design_effect: variance of shares of drafts, relative to that of independent ones.
        least_gain: smallest speed, relative to plain decoding, of speculation that pays. It is 1 while a
            controller has stopped to draft.
        gain_seconds: seconds of decoding before the gain is judged.
        undrafted_tokens: tokens without any draft that are no coincidence.
    """

    window_seconds: float = 600.0
    dead_head_drafts: float = ALARM_WINDOW
    dead_head_share: float = ALARM_SHARE
    drift_drafts: float = 400.0
    drift_tolerance: float = 0.05
    drift_errors: float = 3.0
    design_effect: float = 8.0
    least_gain: float = 1.01
    gain_seconds: float = 10.0
    undrafted_tokens: float = 1000.0


LIMITS = Limits()
