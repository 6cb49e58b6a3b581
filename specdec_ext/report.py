"""``Report``: what the controller measured up to the end of a call, as data and as text."""

from __future__ import annotations

from dataclasses import dataclass

# Width of the interval relative to the gain above which no gain is reported.
TOO_WIDE = 0.5


@dataclass
class Report:
    """What the controller knows at the end of a call, from this call and earlier ones.

    Attributes:
        verify: (rows, nodes, seconds of a step without its draft, number of times kept).
        drafts: (rows, name of the drafts, seconds of a draft, number of times kept).
        acceptance: (kind of draft, [a_1, a_2, ...], observations of its first position, older ones faded).
        gain: speed relative to the estimated speed of plain decoding, in this call.
        low, high: the 95 % interval of ``gain``.
    """

    verify: list[tuple[int, int, float, int]]
    drafts: list[tuple[int, str, float, int]]
    acceptance: list[tuple[str, list[float], float]]
    gain: float
    low: float
    high: float

    def speed_up(self, steps: int) -> str:
        """Describe the gain in this call of ``steps`` steps."""
        if self.high - self.low > TOO_WIDE * self.gain:
            measured = sum(times for _, nodes, _, times in self.verify if nodes == 1)
            return (
                f"the call was too short to measure a speed-up: the times of {_count(steps, 'step')} and of "
                f"{_count(measured, 'plain step')} for comparison scatter too much."
            )
        return (
            f"{self.gain:.2f}x the estimated speed of plain decoding "
            f"(95 % interval: {self.low:.2f}x to {self.high:.2f}x)."
        )

    def why_plain(self) -> str:
        """The reason why most steps were plain although the drafter had something to propose."""
        if not self.acceptance:
            return "The call ended before anything was drafted."
        kind, rates, _ = max(self.acceptance, key=lambda known: known[2])
        return (
            f"Most steps were plain: {rates[0]:.0%} of first draft tokens ({kind}) are right, which does not "
            "pay for the draft and the wider pass."
        )

    def lines(self) -> list[str]:
        """The measured times and acceptance as tables."""
        lines = [f"{'time of a step without its draft':<33}ms  times  vs 1 node"]
        plain = {rows: seconds for rows, nodes, seconds, _ in self.verify if nodes == 1}
        for rows, nodes, seconds, times in self.verify:
            ratio = f"{seconds / plain[rows]:.2f}x" if plain.get(rows) else ""
            what = f"  {_count(rows, 'row'):<8} {_count(nodes, 'node'):<14}"
            lines.append(f"{what} {seconds * 1e3:>9.3f} {times:>6}  {ratio:>9}")
        lines += ["", f"{'time of a draft':<33}ms  times"]
        for rows, name, seconds, times in self.drafts:
            lines.append(f"  {_count(rows, 'row'):<8} {name:<14} {seconds * 1e3:>9.3f} {times:>6}")
        lines += [
            "",
            "acceptance of positions 1, 2, ..., given that the position before was accepted",
        ]
        for kind, rates, judged in self.acceptance:
            shown = " ".join(f"{rate:.2f}" for rate in rates)
            lines.append(f"  {kind:<24} {shown}   from {judged:.0f} recent drafts")
        return lines


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")
