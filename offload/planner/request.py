"""What a plan is asked for. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

from offload.planner import demand
from offload.planner.fill import Load
from offload.planner.form import StateForm
from offload.planner.layout import DTYPE_BYTES, UnitSpec
from offload.planner.passing import KEPT
from offload.planner.share import ALONE, Share


@dataclass(frozen=True)
class Capacities:
    """Budgets in bytes. `rests`: state may rest in device memory and be updated there. `direct`: the device computes from host memory.

    `drives` divides the nvme budget, where there are several: no shard is divided between them.
    """

    device: int
    host: int
    nvme: int
    rests: bool
    direct: bool
    drives: tuple[int, ...] = ()

    @property
    def by_tier(self) -> dict[str, int]:
        return {"device": self.device, "host": self.host, "nvme": self.nvme}


@dataclass(frozen=True)
class Request:
    """What is to be placed, within what, and what of it is fixed; see `plan_units`."""

    units: tuple[UnitSpec, ...]
    capacities: Capacities
    form: StateForm
    grad: str
    place: dict[str, str]
    activations: str
    batch: demand.Batch | None
    kept: int = 0  # at the least, where not all are
    part: Share = ALONE
    moves: str = "fp32"
    kinds: tuple[int, ...] = ()  # by unit, where gradients may pass
    accumulate: int = 1  # micro-batches a step
    whole: float = math.inf  # units at the most that rest whole on the device

    @property
    def compute(self) -> str:
        return self.form.compute

    @cached_property
    def reduction(self) -> int:
        return demand.reduction_bytes(self.units, self.moves, self.part.ranks)

    @cached_property
    def load(self) -> Load:
        return Load(self.place, self.capacities.rests, self.capacities.direct, self.whole)

    @cached_property
    def role_bytes(self) -> dict[str, int]:
        """Bytes of each role at rest without padding, of which this rank has its part."""
        sizes = [p.numel for u in self.units for p in u.parameters if p.trained]
        trained = sum(sizes)
        passing = {u for u, kind in enumerate(self.kinds) if kind != KEPT}
        resting = sum(p.numel for n, u in enumerate(self.units) if n not in passing for p in u.parameters if p.trained)
        frozen = sum(p.numel * DTYPE_BYTES[p.dtype] for u in self.units for p in u.parameters if not p.trained)
        whole = {
            "parameter": trained * DTYPE_BYTES[self.compute] + frozen,
            "gradient": resting * DTYPE_BYTES[self.grad],
            "optimizer": sum(self.form.nbytes(n) for n in sizes),
        }
        return {role: n // self.part.ranks if self.part.divides(role) else n for role, n in whole.items()}

    @property
    def may_stay(self) -> bool:
        """Whether parameters may stay on the device from pass to pass: it has memory of its own, and no rank waits for another's."""
        return not self.capacities.direct and self.part.ranks == 1 and "parameter" not in self.place

    @property
    def may_sum(self) -> bool:
        """Whether sums of gradients may stay on the device: it has memory and kernels of its own, and nobody else's are to be added."""
        kernels = self.capacities.rests and not self.capacities.direct
        return self.accumulate > 1 and kernels and self.part.ranks == 1 and "gradient" not in self.place

    def fixed(self, tier: str) -> int:
        return sum(n for role, n in self.role_bytes.items() if self.place.get(role) == tier)

    @property
    def share(self) -> int:
        """Half of what the device has beside slots waits for the activations of a batch that is not known yet."""
        return 1 if self.batch is not None else 2

    @cached_property
    def at_once(self) -> int:
        return demand.bound_at_once(self.units)
