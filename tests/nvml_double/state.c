/* The mapping, and reading it while Python writes. */
#define _GNU_SOURCE
#include "sim.h"

#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct sim_machine *mapped;
static unsigned int references;
static int file = -1; /* open while initialised, as the driver's device files are */
static struct stat identity;
static struct nvmlDevice_st handles[SIM_MAX_GPUS];
static uint32_t frozen_order[SIM_MAX_GPUS];
static uint32_t frozen_count;

struct sim_machine *sim_machine(void) {
    return __atomic_load_n(&mapped, __ATOMIC_ACQUIRE);
}

static nvmlReturn_t map_file(const char *path) {
    struct stat now;
    int descriptor = open(path, O_RDWR | O_CLOEXEC);
    if (descriptor < 0) {
        return NVML_ERROR_DRIVER_NOT_LOADED;
    }
    if (fstat(descriptor, &now) != 0 || (size_t)now.st_size != sizeof(struct sim_machine)) {
        fprintf(stderr, "simulated NVML: %s is no state of this version\n", path);
        close(descriptor);
        return NVML_ERROR_UNKNOWN;
    }
    if (mapped == NULL || now.st_ino != identity.st_ino || now.st_dev != identity.st_dev) {
        struct sim_machine *machine =
            mmap(NULL, sizeof(*machine), PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
        if (machine == MAP_FAILED) {
            close(descriptor);
            return NVML_ERROR_UNKNOWN;
        }
        if (machine->magic != SIM_MAGIC || machine->version != SIM_VERSION) {
            fprintf(stderr, "simulated NVML: %s was made by another build\n", path);
            munmap(machine, sizeof(*machine));
            close(descriptor);
            return NVML_ERROR_UNKNOWN;
        }
        identity = now;
        __atomic_store_n(&mapped, machine, __ATOMIC_RELEASE);
    }
    if (file >= 0) {
        close(file);
    }
    file = descriptor;
    return NVML_SUCCESS;
}

nvmlReturn_t sim_map(void) {
    nvmlReturn_t result = NVML_SUCCESS;
    pthread_mutex_lock(&lock);
    if (references == 0) {
        const char *path = getenv("GNA_SIM_STATE");
        result = path == NULL ? NVML_ERROR_DRIVER_NOT_LOADED : map_file(path);
    }
    pthread_mutex_unlock(&lock);
    return result;
}

static uint32_t plugged_in(struct sim_machine *machine, uint32_t order[SIM_MAX_GPUS]);

/* Initialisations are counted. */
static nvmlReturn_t initialise(void) {
    nvmlReturn_t result = sim_map();
    if (result != NVML_SUCCESS) {
        return result;
    }
    struct sim_machine *machine = sim_machine();
    result = sim_strike(machine, SIM_nvmlInit, -1); /* outside the lock: it may hang */
    if (result == NVML_SUCCESS && machine->driver_mismatch) {
        result = NVML_ERROR_LIB_RM_VERSION_MISMATCH;
    }
    pthread_mutex_lock(&lock);
    if (result == NVML_SUCCESS) {
        if (references == 0) {
            frozen_count = plugged_in(machine, frozen_order);
        }
        __atomic_add_fetch(&references, 1, __ATOMIC_ACQ_REL);
    } else if (references == 0 && file >= 0) {
        close(file);
        file = -1;
    }
    pthread_mutex_unlock(&lock);
    return result;
}

nvmlReturn_t nvmlInit_v2(void) {
    return initialise();
}

nvmlReturn_t nvmlInit(void) {
    return initialise();
}

nvmlReturn_t nvmlInitWithFlags(unsigned int flags) {
    (void)flags;
    return initialise();
}

nvmlReturn_t nvmlShutdown(void) {
    SIM_GATE(nvmlShutdown);
    pthread_mutex_lock(&lock);
    if (references > 0 && __atomic_sub_fetch(&references, 1, __ATOMIC_ACQ_REL) == 0 && file >= 0) {
        close(file);
        file = -1;
    }
    pthread_mutex_unlock(&lock);
    return NVML_SUCCESS;
}

int sim_ready(void) {
    return __atomic_load_n(&references, __ATOMIC_ACQUIRE) > 0;
}

nvmlReturn_t sim_gate(enum sim_call call) {
    if (!sim_ready()) {
        return NVML_ERROR_UNINITIALIZED;
    }
    return sim_strike(sim_machine(), call, -1);
}

nvmlReturn_t sim_gate_device(enum sim_call call, nvmlDevice_t device, struct sim_gpu **gpu) {
    if (!sim_ready()) {
        return NVML_ERROR_UNINITIALIZED;
    }
    int32_t slot = sim_slot(device);
    SIM_NEED(slot >= 0);
    struct sim_machine *machine = sim_machine();
    nvmlReturn_t struck = sim_strike(machine, call, slot);
    if (struck != NVML_SUCCESS) {
        return struck;
    }
    if (!sim_present(machine, (uint32_t)slot)) {
        return NVML_ERROR_GPU_IS_LOST;
    }
    *gpu = &machine->gpus[slot];
    return NVML_SUCCESS;
}

nvmlDevice_t sim_handle(uint32_t slot) {
    handles[slot].slot = slot;
    return &handles[slot];
}

int32_t sim_slot(nvmlDevice_t device) {
    for (uint32_t slot = 0; slot < SIM_MAX_GPUS; slot++) {
        if (device == &handles[slot]) {
            return (int32_t)slot;
        }
    }
    return sim_part_slot(device);
}

uint32_t sim_begin(struct sim_machine *machine) {
    return __atomic_load_n(&machine->sequence, __ATOMIC_ACQUIRE);
}

int sim_torn(struct sim_machine *machine, uint32_t begun, unsigned *tries) {
    __atomic_thread_fence(__ATOMIC_ACQUIRE);
    if (begun % 2 == 0 && __atomic_load_n(&machine->sequence, __ATOMIC_RELAXED) == begun) {
        return 0;
    }
    /* A writer that died half-way must not hang its readers. */
    usleep(10);
    return ++*tries < 1000;
}

static uint32_t plugged_in(struct sim_machine *machine, uint32_t order[SIM_MAX_GPUS]) {
    uint32_t begun, count;
    unsigned tries = 0;
    do {
        begun = sim_begin(machine);
        count = machine->gpu_count;
        memcpy(order, machine->order, sizeof(machine->order));
    } while (sim_torn(machine, begun, &tries));
    return count <= SIM_MAX_GPUS ? count : SIM_MAX_GPUS;
}

uint32_t sim_enumerate(struct sim_machine *machine, uint32_t order[SIM_MAX_GPUS]) {
    if (!machine->enumerates_at_open) {
        return plugged_in(machine, order);
    }
    memcpy(order, frozen_order, sizeof(frozen_order));
    return frozen_count;
}

int sim_present(struct sim_machine *machine, uint32_t slot) {
    uint32_t order[SIM_MAX_GPUS];
    uint32_t count = plugged_in(machine, order);
    for (uint32_t index = 0; index < count; index++) {
        if (order[index] == slot) {
            return machine->gpus[slot].presence == SIM_PRESENCE_PRESENT;
        }
    }
    return 0;
}

nvmlReturn_t sim_copy(const char *text, size_t size, char *buffer, unsigned int length) {
    SIM_NEED(buffer != NULL);
    size_t used = strnlen(text, size);
    if (length <= used) {
        return NVML_ERROR_INSUFFICIENT_SIZE;
    }
    memcpy(buffer, text, used);
    buffer[used] = '\0';
    return NVML_SUCCESS;
}

void sim_pci(nvmlPciInfo_t *pci, uint32_t domain, uint32_t bus, uint32_t device, uint32_t id, uint32_t subsystem) {
    memset(pci, 0, sizeof(*pci));
    pci->domain = domain;
    pci->bus = bus;
    pci->device = device;
    pci->pciDeviceId = id;
    pci->pciSubSystemId = subsystem;
    /* Masked, so that the compiler sees that the texts fit. */
    snprintf(pci->busIdLegacy, sizeof(pci->busIdLegacy), NVML_DEVICE_PCI_BUS_ID_LEGACY_FMT, domain & 0xFFFF,
             bus & 0xFF, device & 0xFF);
    snprintf(pci->busId, sizeof(pci->busId), NVML_DEVICE_PCI_BUS_ID_FMT, domain, bus & 0xFF, device & 0xFF);
}
