"""Free capacity of one GPU, for the agent of its node and for the scheduler extender alike: pure."""

import msgspec

from agent.model.demand import CORES, Demand

UNLIMITED = 1 << 30


class FreeGpu(msgspec.Struct, frozen=True, gc=False):
    """Units of one GPU that are neither held nor reserved. The extender makes 80,000 at once."""

    gpu: str  # UUID
    index: int
    cores: int
    blocks: int
    all_blocks: int
    untouched: bool  # nothing of it is held or reserved
    clients: int = UNLIMITED  # further containers that may hold a share of it

    @property
    def largest_share(self) -> int:
        """The largest share in hundredths that fits, with memory asked for in proportion."""
        return min(self.cores, self.blocks * CORES // self.all_blocks) if self.all_blocks else 0

    def fits(self, demand: Demand, containers: int = 1) -> bool:
        """Whether a share fits that so many containers hold together."""
        return self.cores >= demand.cores and self.blocks >= demand.blocks and self.clients >= containers

    def after(self, demand: Demand, containers: int = 1) -> "FreeGpu":
        """With a share placed on it, or with all of it taken."""
        if demand.whole:
            return FreeGpu(self.gpu, self.index, 0, 0, self.all_blocks, untouched=False, clients=0)
        return FreeGpu(
            self.gpu,
            self.index,
            self.cores - demand.cores,
            self.blocks - demand.blocks,
            self.all_blocks,
            untouched=False,
            clients=self.clients - containers,
        )
