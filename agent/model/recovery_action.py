"""The recovery action that the driver itself asks for: NVML_FI_DEV_GET_GPU_RECOVERY_ACTION.

Numbers and meaning: nvml.h, `nvmlDeviceGpuRecoveryAction_t`, and NVIDIA's GPU Memory Error Management,
"Error Recovery and Response Flags". Drivers before R565 have no such field.
"""

from enum import IntEnum


class RecoveryAction(IntEnum):
    NONE = 0
    GPU_RESET = 1
    NODE_REBOOT = 2
    DRAIN_P2P = 3
    DRAIN_AND_RESET = 4
    RECOVER_IMEX_DOMAIN = 5
    BUS_RESET = 6
    SYSTEM_REBOOT = 7
    OTHER = 255  # of a driver that knows more than this table

    @classmethod
    def of(cls, number: int) -> "RecoveryAction":
        try:
            return cls(number)
        except ValueError:
            return cls.OTHER

    @property
    def forbids_work(self) -> bool:
        """Whether no new work may be given to the GPU.

        RECOVER_IMEX_DOMAIN concerns memory shared between machines: the GPU itself goes on working.
        """
        return self not in (RecoveryAction.NONE, RecoveryAction.RECOVER_IMEX_DOMAIN)

    @property
    def reboots(self) -> bool:
        """Whether the machine has to be booted."""
        return self in (RecoveryAction.NODE_REBOOT, RecoveryAction.SYSTEM_REBOOT)

    @property
    def words(self) -> str:
        return f"the driver asks for {_WORDS[self]}"


_WORDS = {
    RecoveryAction.NONE: "nothing",
    RecoveryAction.GPU_RESET: "a reset of the GPU",
    RecoveryAction.NODE_REBOOT: "a reboot of the node",
    RecoveryAction.DRAIN_P2P: "an end of all peer-to-peer traffic of the GPU",
    RecoveryAction.DRAIN_AND_RESET: "a reset of the GPU once its work has ended",
    RecoveryAction.RECOVER_IMEX_DOMAIN: "a recovery of the IMEX domain",
    RecoveryAction.BUS_RESET: "a reset of the GPU's PCIe bus",
    RecoveryAction.SYSTEM_REBOOT: "a reboot of the system",
    RecoveryAction.OTHER: "a recovery action that this agent does not know",
}
