"""Hours and money of a run at its predicted speed."""

from __future__ import annotations

from dataclasses import dataclass

from megacpp.speed.step import MEASURED, StepTime


@dataclass(frozen=True)
class Cost:
    """Time and money of a run.

    Attributes:
        tokens: of the run; 0: not asked for.
        price: of one GPU for an hour; 0: not asked for.
        world: number of GPUs.
    """

    tokens: int
    price: float
    world: int

    def hours(self, time: StepTime) -> float:
        """Return hours of the run at a predicted speed."""
        return self.tokens / (time.tokens_per_s * self.world) / 3600

    def money(self, time: StepTime) -> float:
        """Return the price of the run, or of 1e9 tokens where no number is asked for."""
        return self.price * (self.tokens or 10**9) / time.tokens_per_s / 3600

    def as_dict(self, time: StepTime) -> dict[str, float]:
        """Return what was asked for, for JSON; hours, and the unit of the price."""
        found = {"hours": self.hours(time)} if self.tokens else {}
        if self.price:
            found["cost" if self.tokens else "cost_per_1e9_tokens"] = self.money(time)
        return found

    def words(self, time: StepTime) -> str:
        """Return what was asked for as text, with the range of the prediction."""
        low, high = MEASURED
        parts = []
        if self.tokens:
            hours = self.hours(time)
            parts.append(
                f"{self.tokens:,} tokens take {span(hours)} ({span(low * hours)} to "
                f"{span(high * hours)})"
            )
        if self.price:
            money = self.money(time)
            what = "" if self.tokens else "1,000,000,000 tokens "
            parts.append(
                f"{what}cost {amount(money)} ({amount(low * money)} to {amount(high * money)})"
            )
        return " and ".join(parts)


def span(hours: float) -> str:
    """Return hours as text, in days if they are many."""
    return f"{hours / 24:,.1f} days" if hours >= 48 else f"{hours:,.1f} hours"


def amount(money: float) -> str:
    """Return a price as text, with a decimal where it is small."""
    return f"{money:,.0f}" if money >= 10 else f"{money:.1f}"
