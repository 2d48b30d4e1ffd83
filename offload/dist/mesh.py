"""Which ranks a DeviceMesh puts together.

[Note: groups]
A mesh of two dimensions is (replicate, shard), as FSDP2 has it: a row is a group of ranks that divide state among them, and every row has all of it.
What is divided is gathered within a row; gradients are summed within rows and then, a share at a time, down columns, so that they cross from one row
to another as 1/S of their bytes, S being the ranks of a row. A mesh of one row is as one of one dimension; one whose rows are of one rank divides
nothing, as stage 0 does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from offload.errors import ConfigError

_OTHERS = {"tp", "pp", "cp", "ep", "sp"}  # names that parallelism of other kinds has


def rows_of(mesh: Any) -> list[list[int]]:
    """The ranks of a DeviceMesh, as the default group counts them, row by row; a mesh of one dimension is one row. ConfigError for other meshes."""
    dimensions = getattr(mesh, "ndim", None)
    names = getattr(mesh, "mesh_dim_names", None) or ()
    if dimensions not in (1, 2):
        raise ConfigError(
            f"mesh has {dimensions} dimensions: give a DeviceMesh of one, or of two that are (replicate, shard), as mesh['shard'] or "
            "mesh['replicate', 'shard'] takes it from a larger one"
        )
    if dimensions == 2 and names:
        if _OTHERS & set(names):
            raise ConfigError(
                f"mesh has the dimensions {tuple(names)}: state is divided over those of data alone, so give mesh['dp'], or what it is called"
            )
        if "shard" in names[0] or "replicate" in names[1]:
            raise ConfigError(f"mesh has the dimensions {tuple(names)}: they are taken as (replicate, shard), so make it with the other order")
    if mesh.get_coordinate() is None:
        raise ConfigError("this rank is not in the mesh, so it cannot train with those that are; give it a mesh of its own")
    rows = mesh.mesh.tolist()
    return rows if dimensions == 2 else [rows]


def equal_rows(size: int, replicas: int) -> list[list[int]]:
    """Ranks 0 to `size` in rows, one of each replica; ConfigError where they would not be equal."""
    if replicas < 1 or size % replicas:
        ranks = f"{size} ranks" if size > 1 else "one rank"
        raise ConfigError(f"replicate = {replicas}: {ranks} cannot be {replicas} equal groups; give a divisor of the number of ranks")
    row = size // replicas
    return [list(range(i * row, (i + 1) * row)) for i in range(replicas)]


def beside(rows: Sequence[Sequence[int]], tensor: Sequence[int], rank: int, size: int) -> list[int]:
    """Of `size` ranks, those of a mesh whose one dimension is `tensor`, over which parameters are divided already, and whose others are these rows;
    both have `rank`. ConfigError where they are no dimensions of one mesh."""
    data = [r for row in rows for r in row]
    if set(data) & set(tensor) != {rank}:
        raise ConfigError(
            f"parameters are DTensors over ranks {list(tensor)}, and mesh would divide them again among ranks {data}: give the mesh's other "
            "dimension, as prepare(..., mesh=mesh['dp'])"
        )
    every = sorted({d + t - rank for d in data for t in tensor})
    if len(every) < len(data) * len(tensor) or every[0] < 0 or every[-1] >= size:
        raise ConfigError(f"ranks {data} and {list(tensor)} are no two dimensions of one mesh: take both from init_device_mesh(..., (dp, tp))")
    return every


def column(rows: Sequence[Sequence[int]], rank: int) -> list[int]:
    """The ranks, one of each row, at the place of `rank` in its own."""
    place = next(row.index(rank) for row in rows if rank in row)
    return [row[place] for row in rows]
