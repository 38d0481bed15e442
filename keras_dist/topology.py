"""The rank of this process among the others."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Topology:
    """The rank of this process in the cluster. It never changes after `kd.init()`.

    Args:
        rank: Index of this process, `0 <= rank < size`.
        size: Number of processes that train together.
        local_rank: Index of this process among those on the same host.
        local_size: Number of processes on this host.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1

    @property
    def is_chief(self) -> bool:
        """True on the one process that writes files and shows progress."""
        return self.rank == 0

    def __str__(self) -> str:
        return f"rank {self.rank} of {self.size}"
