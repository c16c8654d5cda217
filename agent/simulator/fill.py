"""A GPU of a profile, written into its slot of the shared state."""

from agent.simulator import events
from agent.simulator.mig import fill_profiles
from agent.simulator.profile import MIB, Link, Profile
from agent.simulator.state import MAX_GPUS, GpuState

_PEER_GPU = 0  # nvmlIntNvLinkDeviceType_t
_PEER_SWITCH = 2
_SWITCH_DEVICE_ID = 0x22A310DE
_BRAND_TESLA = 2
_BRAND_NVIDIA = 14
_GPM_SINCE = (9, 0)
_MIG_WITHOUT_RESET_SINCE = 9  # Hopper, by the MIG user guide
_IDLE = 0x1  # nvmlClocksEventReasonGpuIdle


def fill_gpu(gpu: GpuState, profile: Profile, slot: int) -> None:
    """Fill a slot with the GPU at that position of the profile: idle and healthy."""
    model, place = profile.model, profile.places[slot]
    gpu.used = 1
    gpu.uuid = profile.uuid_of(slot).encode()
    gpu.name = model.product.encode()
    gpu.serial = f"16521{slot:02d}{model.pci_device_id >> 16:05d}".encode()
    gpu.cpu_list = place.cpu_list.encode()
    gpu.domain, gpu.bus, gpu.device = parse_bus_id(place.bus_id)
    gpu.pci_device_id, gpu.pci_subsystem_id = model.pci_device_id, model.pci_subsystem_id
    gpu.minor = slot
    gpu.numa_node = -1 if place.numa_node is None else place.numa_node
    gpu.cc_major, gpu.cc_minor = model.compute_capability
    gpu.architecture = model.architecture
    gpu.brand = _BRAND_NVIDIA if model.product.startswith("NVIDIA") else _BRAND_TESLA
    gpu.mig_capable = int(model.mig_capable)
    gpu.mig_needs_reset = int(model.architecture < _MIG_WITHOUT_RESET_SINCE)
    gpu.memory_total, gpu.memory_reserved = model.memory_mib * MIB, model.reserved_mib * MIB
    gpu.power_limit_mw, gpu.power_mw = model.power_limit_w * 1000, model.idle_w * 1000
    gpu.temperature_c = 28 + slot % 4
    gpu.performance_state = 0
    gpu.event_reasons = _IDLE
    gpu.ecc_supported = 1
    gpu.remap_supported = int(model.remaps_rows)
    gpu.retirement_supported = int(not model.remaps_rows)
    gpu.gpm_supported = int(model.compute_capability >= _GPM_SINCE)
    gpu.supported_events = events.ECC_SINGLE | events.ECC_DOUBLE | events.PSTATE | events.XID | events.CLOCK
    for clock, limit in enumerate(model.max_clocks_mhz):
        gpu.max_clocks_mhz[clock] = limit
        gpu.clocks_mhz[clock] = limit if clock == 2 else limit // 5  # memory clocks rest high
    for other in range(MAX_GPUS):
        gpu.ancestor[other] = profile.ancestor(slot, other)
    if model.mig_capable:
        fill_profiles(gpu)
    if profile.links:
        _fill_links(gpu, profile, profile.links[slot])


def _fill_links(gpu: GpuState, profile: Profile, links: tuple[Link, ...]) -> None:
    gpu.link_count = len(links)
    for number, link in enumerate(links):
        wire = gpu.links[number]
        wire.active, wire.version = 1, profile.model.nvlink_version
        if link.gpu is not None:
            wire.peer_type, address = _PEER_GPU, profile.places[link.gpu].bus_id
            wire.pci_device_id = profile.model.pci_device_id
        else:
            wire.peer_type, address = _PEER_SWITCH, link.switch or ""
            wire.pci_device_id = _SWITCH_DEVICE_ID
        wire.domain, wire.bus, wire.device = parse_bus_id(address)


def parse_bus_id(text: str) -> tuple[int, int, int]:
    """Domain, bus and device of a PCI address in any spelling (`0000:1b:00.0`, `00000000:1B:00.0`)."""
    domain, bus, rest = text.split(":")
    return int(domain, 16), int(bus, 16), int(rest.partition(".")[0], 16)


def sysfs_bus_id(domain: int, bus: int, device: int) -> str:
    """A PCI address as sysfs writes it."""
    return f"{domain:04x}:{bus:02x}:{device:02x}.0"
