"""Figures, the targets that stand beside them, and the table."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

OURS, RIVAL = "ours/asyncio", "baseline/asyncio"
"""The two that are compared with each other, where a figure does not name another rival."""

TRIO_FACTOR = 1.5
"""How much worse than on asyncio a figure may be on trio."""


@dataclasses.dataclass(frozen=True)
class Target:
    """What a figure should be: a sentence, the number that was measured for it, and whether it is met."""

    text: str
    measured: float
    met: bool


@dataclasses.dataclass
class Figure:
    """One line of the table. ``rounds`` holds each contestant's samples, in ``unit``, in the order of the rounds.

    ``rival`` is the contestant that :data:`OURS` is compared with.
    """

    name: str
    unit: str
    rounds: Mapping[str, Sequence[float]]
    higher_is_better: bool = False
    digits: int = 1
    rival: str = RIVAL
    targets: list[Target] = dataclasses.field(default_factory=list[Target])

    def median(self, contestant: str) -> float | None:
        """The contestant's median, or None if it did not take part."""
        samples = self.rounds.get(contestant)
        return statistics.median(samples) if samples else None

    def ratio(self, contestant: str, other: str) -> float | None:
        """The median of the ratios within each round, which what changes from round to round does not touch."""
        ours, theirs = self.rounds.get(contestant), self.rounds.get(other)
        if not ours or not theirs:
            return None
        return statistics.median(a / b for a, b in zip(ours, theirs, strict=True))

    @property
    def rival_name(self) -> str:
        """The rival's name without its event loop."""
        return self.rival.partition("/")[0]

    def against_rival(self, limit: float) -> Figure:
        """Ask for ``limit`` times the rival's figure, at least or at most, whichever is better."""
        ratio = self.ratio(OURS, self.rival)
        if ratio is not None:
            sign = ">=" if self.higher_is_better else "<="
            met = ratio >= limit if self.higher_is_better else ratio <= limit
            self.targets.append(Target(f"{sign} {limit:g}x {self.rival_name}", ratio, met))
        return self

    def trio_close(self) -> Figure:
        """Ask that trio is within :data:`TRIO_FACTOR` of asyncio."""
        ratio = self.ratio("ours/trio", OURS)
        if ratio is not None:
            worse = 1 / ratio if self.higher_is_better else ratio
            self.targets.append(Target(f"trio within {TRIO_FACTOR:g}x", worse, worse <= TRIO_FACTOR))
        return self

    def at_most(self, limit: float) -> Figure:
        """Ask that the figure of every event loop of ours is at most ``limit``, in ``unit``."""
        worst = max((self.median(key) or 0.0 for key in self.rounds if key.startswith("ours/")), default=None)
        if worst is not None:
            self.targets.append(Target(f"<= {limit:g} {self.unit}", worst, worst <= limit))
        return self

    def as_json(self) -> dict[str, Any]:
        """Everything about it."""
        return {
            "name": self.name,
            "unit": self.unit,
            "higher_is_better": self.higher_is_better,
            "medians": {key: self.median(key) for key in self.rounds},
            f"ratio_to_{self.rival_name}": self.ratio(OURS, self.rival),
            "ratio_of_trio_to_asyncio": self.ratio("ours/trio", OURS),
            "targets": [dataclasses.asdict(target) for target in self.targets],
            "rounds": {key: list(samples) for key, samples in self.rounds.items()},
        }


def print_table(figures: Sequence[Figure], contestants: Sequence[str], title: str) -> None:
    """Print all figures as one table; columns are the contestants that took part."""
    table = Table(title=title, title_justify="left", header_style="bold", pad_edge=False)
    table.add_column("figure", no_wrap=True)
    table.add_column("unit", no_wrap=True)
    for key in contestants:
        name, _, backend = key.partition("/")
        table.add_column(f"{name}\n{backend}", justify="right", no_wrap=True)
    table.add_column(f"ours :\n{figures[0].rival_name}", justify="right", no_wrap=True)
    table.add_column("target (measured)")
    for figure in figures:
        ratio = figure.ratio(OURS, figure.rival)
        table.add_row(
            figure.name,
            figure.unit,
            *(_number(figure.median(key), figure.digits) for key in contestants),
            "" if ratio is None else f"{ratio:.2f}",
            "\n".join(_show(target) for target in figure.targets),
        )
    Console(width=max(Console().width, 150)).print(table)


def _number(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:,.{digits}f}"


def _show(target: Target) -> str:
    mark = "[green]yes[/green]" if target.met else "[red]NO[/red]"
    return f"{mark} {target.text} ({target.measured:.3g})"
