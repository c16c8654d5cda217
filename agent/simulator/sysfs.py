"""A tree with the files of /sys that show where GPUs sit, for the real binding on a simulated machine."""

from pathlib import Path

from agent.simulator.fill import sysfs_bus_id
from agent.simulator.state import MAX_GPUS, GpuState, MachineState, Presence


def write_sysfs(state: MachineState, directory: Path) -> None:
    """Write `bus/pci/devices/<address>/` for every GPU that is on the bus; others' folders are removed."""
    present = set(state.order[: state.gpu_count])
    for slot in range(MAX_GPUS):
        gpu = state.gpus[slot]
        if not gpu.used:
            continue
        folder = directory / "bus/pci/devices" / sysfs_bus_id(gpu.domain, gpu.bus, gpu.device)
        if slot in present and gpu.presence != Presence.FALLEN:
            _write(folder, gpu)
        elif folder.exists():
            for file in folder.iterdir():
                file.unlink()
            folder.rmdir()


def _write(folder: Path, gpu: GpuState) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    texts = {
        "numa_node": str(gpu.numa_node),
        "local_cpulist": gpu.cpu_list.decode(),
        "vendor": f"0x{gpu.pci_device_id & 0xFFFF:04x}",
        "device": f"0x{gpu.pci_device_id >> 16:04x}",
        "class": "0x030200",
    }
    for name, text in texts.items():
        (folder / name).write_text(text + "\n")
