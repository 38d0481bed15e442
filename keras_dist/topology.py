"""The rank of this process among the others."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Topology:
    """The rank of this process in the cluster. It never changes after `kd.init()`."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0  # among the processes on the same host
    local_size: int = 1

    @property
    def is_chief(self) -> bool:
        """True on the one process that writes files and shows progress."""
        return self.rank == 0

    def __str__(self) -> str:
        return f"rank {self.rank} of {self.size}"
