"""Parameters that tensor parallelism has divided over ranks already: DTensors.

[Note: tensor parallel]
Such a parameter is a DTensor over a mesh of its own, of one dimension; what this rank has of it is its part, a plain tensor. The engine knows parts
alone: they are packed, divided among the ranks of data, moved and updated like any parameter. At rest the parameter is a DTensor whose part is a
tensor at rest, so reading it, its gradient and its moments give DTensors; while a unit computes, one whose part views a slot, so the model's own
collectives run as they did. A gradient is brought to the parameter's placement and lands as a part. What all must decide alike (norms, clipping,
skipped steps) counts each element once, over the ranks of data and these.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from offload.errors import ConfigError, OffloadError


def is_divided(tensor: torch.Tensor) -> bool:
    return hasattr(tensor, "_local_tensor")


def part_of(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a DTensor; any other tensor itself."""
    return tensor._local_tensor if is_divided(tensor) else tensor  # type: ignore[attr-defined]


def whole(part: torch.Tensor, spec: Any) -> torch.Tensor:
    """The DTensor of which this rank has `part`."""
    from torch.distributed.tensor import DTensor

    return DTensor(part, spec, requires_grad=False)


class Place(NamedTuple):
    """Where the elements of a part lie in the whole, both flat: runs of `width`, `stride` apart, the first at element `first`.

    `cut`: the whole is cut at multiples of so many elements, on all ranks; 1 where it is cut otherwise.
    """

    width: int
    stride: int
    first: int
    cut: int = 1

    def runs(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """Elements [start, stop) of the part as (first, stop, its place in the whole) of each run."""
        while start < stop:
            row, at = divmod(start, self.width)
            end = min(stop, start + self.width - at)
            yield start, end, row * self.stride + self.first + at
            start = end

    def within(self, start: int, stop: int) -> tuple[int, int]:
        """Of elements [start, stop) of the whole those of the part, as it counts them: first and behind the last."""
        if not self.width:
            return 0, 0
        first, last = (row * self.width + min(max(at - self.first, 0), self.width) for row, at in (divmod(n, self.stride) for n in (start, stop)))
        return first, last

    def pick(self, values: torch.Tensor, at: int) -> torch.Tensor:
        """Of elements of the whole, flat, from number `at` on, those of the part."""
        picked, start, stop = [values[:0]], at, at + values.numel()
        while start < stop:
            row, column = divmod(start, self.stride)
            rows = (stop - start) // self.stride if column == 0 else 0
            if rows:
                here = values[start - at : start - at + rows * self.stride].view(rows, self.stride)
                picked.append(here[:, self.first : self.first + self.width].reshape(-1))
                start += rows * self.stride
                continue
            end = min(stop, (row + 1) * self.stride)
            low, high = max(column, self.first), min(end - row * self.stride, self.first + self.width)
            picked.append(values[row * self.stride + low - at : row * self.stride + max(low, high) - at])
            start = end
        return picked[1] if len(picked) == 2 else torch.cat(picked)

    def grouped(self, group: int) -> Place | None:
        """That of arrays with one element for so many of these; None, on all ranks, where groups of parts are none of the whole."""
        if self.cut % group:
            return None
        return Place(-(-self.width // group), -(-self.stride // group), self.first // group, self.cut // group)


@dataclass
class Divided:
    """How a parameter is divided: `spec` is its DTensorSpec."""

    name: str
    spec: Any
    _by_dtype: dict[torch.dtype, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, name: str, parameter: torch.Tensor) -> Divided | None:
        """None for what is no DTensor. ConfigError for one that this does not know."""
        if not is_divided(parameter):
            return None
        spec: Any = parameter._spec  # type: ignore[attr-defined]
        if spec.mesh.ndim != 1:
            raise ConfigError(
                f"parameter {name} is a DTensor over a mesh of {spec.mesh.ndim} dimensions: divide it over one, as mesh['tp'], and give "
                "prepare() the other, mesh['dp']"
            )
        kind = type(spec.placements[0]).__name__
        if kind not in ("Shard", "Replicate"):
            raise ConfigError(f"parameter {name} is a DTensor that is {kind}: only Shard and Replicate are supported")
        return cls(name, spec)

    @property
    def counted_once(self) -> bool:
        """Whether each element is on one of the ranks, and not on all."""
        return bool(self.spec.placements[0].is_shard())

    @property
    def place(self) -> Place | None:
        """Where this rank's part lies in the whole; None where it is the whole."""
        if not self.counted_once:
            return None
        from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

        shape, dim = self.spec.shape, self.spec.placements[0].dim
        own, offset = compute_local_shape_and_global_offset(shape, self.spec.mesh, self.spec.placements)
        inner = shape[dim + 1 :].numel()
        cut = -(-shape[0] // self.spec.mesh.size()) * inner if dim == 0 else 1
        return Place(own[dim] * inner, shape[dim] * inner, offset[dim] * inner, cut)

    def parts(self, values: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
        """Of the whole's values, flat and in pieces, in order, those of this rank's part."""
        place, at = self.place, 0
        for piece in values:
            yield piece if place is None else place.pick(piece, at)
            at += piece.numel()

    def whole(self, part: torch.Tensor) -> torch.Tensor:
        """The DTensor, in the part's dtype, of which this rank has `part`."""
        spec = self._by_dtype.get(part.dtype)
        if spec is None:
            from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

            meta = TensorMeta(self.spec.shape, self.spec.stride, part.dtype)
            spec = self._by_dtype[part.dtype] = DTensorSpec(self.spec.mesh, self.spec.placements, tensor_meta=meta)
        return whole(part, spec)

    def part(self, tensor: torch.Tensor, what: str) -> torch.Tensor:
        """This rank's part of a DTensor of the parameter's shape, brought to its placement. A collective where that is another. OffloadError."""
        if not is_divided(tensor) or tensor.shape != self.spec.shape or tensor._spec.mesh != self.spec.mesh:  # type: ignore[attr-defined]
            raise OffloadError(
                f"{what} of {self.name} is to be a DTensor of shape {tuple(self.spec.shape)} over the parameter's mesh, as the parameter is; "
                "distribute_tensor() makes one"
            )
        if tensor._spec.placements != self.spec.placements:  # type: ignore[attr-defined]
            tensor = tensor.redistribute(placements=self.spec.placements)  # type: ignore[attr-defined]
        part: Any = tensor._local_tensor  # type: ignore[attr-defined]
        return part.wait() if type(part).__name__ == "AsyncCollectiveTensor" else part  # type: ignore[no-any-return]


def check_backends(mesh: Any) -> None:
    """ConfigError where the ranks of a mesh cannot talk of what rests in host memory, where parts do."""
    if mesh.ndim == 1 and torch.device("cpu") not in mesh.get_group()._device_types:
        raise ConfigError(
            "parameters are DTensors over ranks that NCCL alone joins, and rest in host memory, which it does not know: start with "
            "torch.distributed.init_process_group('cpu:gloo,cuda:nccl'), or leave that to offload.prepare()"
        )


def mesh_of(parameters: dict[str, torch.Tensor]) -> Any:
    """The mesh that the DTensors among them are divided over; None where there are none. ConfigError where there are several."""
    meshes = {name: p._spec.mesh for name, p in parameters.items() if is_divided(p)}  # type: ignore[attr-defined]
    first = next(iter(meshes.values()), None)
    for name, mesh in meshes.items():
        if mesh != first:
            raise ConfigError(f"parameter {name} is a DTensor over another mesh than others: divide all over one, as mesh['tp']")
    return first
