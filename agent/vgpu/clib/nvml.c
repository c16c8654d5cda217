/* The answers of NVML in the container, so that nvidia-smi in it shows its cap and its own processes. The library is not
 * loaded by us and nothing of it is called to allocate. Structures as in nvml.h of CUDA 13; older ones begin alike. */
#include "caps.h"

#include <dlfcn.h>
#include <string.h>

enum { NVML_SUCCESS = 0, NVML_INVALID_ARGUMENT = 2, NVML_NOT_SUPPORTED = 3, NVML_INSUFFICIENT_SIZE = 7 };
#define NVML(symbol) __attribute__((visibility("default"))) int symbol

typedef struct nvml_device *device_t;
struct memory {
    unsigned long long total, free, used;
};
struct memory_v2 {
    unsigned int version;
    unsigned long long total, reserved, free, used;
};
struct process_v1 {
    unsigned int pid;
    unsigned long long used;
};
struct process_v2 {
    unsigned int pid;
    unsigned long long used;
    unsigned int gpu_instance, compute_instance;
};

NVML(nvmlDeviceGetMemoryInfo)(device_t device, struct memory *memory);
NVML(nvmlDeviceGetMemoryInfo_v2)(device_t device, struct memory_v2 *memory);

static void *real(const char *name) {
    static _Atomic(void *) handle;
    void *library = atomic_load_explicit(&handle, memory_order_acquire);
    if (library == NULL) {
        library = dlopen("libnvidia-ml.so.1", RTLD_LAZY | RTLD_NOLOAD);
        atomic_store_explicit(&handle, library, memory_order_release);
    }
    return library == NULL ? NULL : gna_real_dlsym(library, name);
}

static int nibble(char digit) {
    return digit >= '0' && digit <= '9' ? digit - '0' : digit >= 'a' && digit <= 'f' ? digit - 'a' + 10 : -1;
}

/* By the UUID: NVML's order of GPUs is not CUDA's. Of "GPU-" or "MIG-" and its 32 digits. */
static int record_of(device_t device) {
    int (*uuid_of)(device_t, char *, unsigned) = real("nvmlDeviceGetUUID");
    char text[96] = {0};
    uint8_t uuid[GNA_UUID_BYTES] = {0};
    unsigned digits = 0;
    if (uuid_of == NULL || !gna_files_open() || uuid_of(device, text, sizeof(text)) != NVML_SUCCESS) {
        return -1;
    }
    for (const char *at = text + 4; *at && digits < 32; at++) {
        if (nibble(*at) >= 0) {
            uuid[digits / 2] = (uint8_t)(uuid[digits / 2] << 4 | nibble(*at));
            digits++;
        }
    }
    return digits == 32 ? gna_record_of_uuid(uuid) : -1;
}

static void capped(device_t device, unsigned long long *total, unsigned long long *free, unsigned long long *used) {
    uint64_t charged, limit;
    gna_charged(record_of(device), &charged, &limit);
    *total = *total < limit ? *total : limit;
    *used = charged < *total ? charged : *total;
    *free = *free < *total - *used ? *free : *total - *used;
}

NVML(nvmlDeviceGetMemoryInfo)(device_t device, struct memory *memory) {
    int (*call)(device_t, struct memory *) = real("nvmlDeviceGetMemoryInfo");
    int result = call == NULL ? NVML_NOT_SUPPORTED : call(device, memory);
    if (result == NVML_SUCCESS) {
        capped(device, &memory->total, &memory->free, &memory->used);
    }
    return result;
}

NVML(nvmlDeviceGetMemoryInfo_v2)(device_t device, struct memory_v2 *memory) {
    int (*call)(device_t, struct memory_v2 *) = real("nvmlDeviceGetMemoryInfo_v2");
    int result = call == NULL ? NVML_NOT_SUPPORTED : call(device, memory);
    if (result == NVML_SUCCESS) {
        capped(device, &memory->total, &memory->free, &memory->used);
        memory->reserved = 0; /* the whole GPU's, not this container's */
    }
    return result;
}

/* The container's own processes by their pids in it, from its own books: NVML knows the node's pids and everybody's. */
static int processes(device_t device, unsigned *count, void *infos, size_t size) {
    int record = record_of(device);
    unsigned room = count == NULL ? 0 : *count, found = 0;
    if (count == NULL || (room > 0 && infos == NULL)) {
        return NVML_INVALID_ARGUMENT;
    }
    if (record < 0 || gna_attach() == NULL || !gna_usage_sound()) {
        *count = 0;
        return NVML_SUCCESS;
    }
    gna_sweep(true);
    uint64_t namespace = gna_attach()->namespace, used = __atomic_load_n(&gna_usage->header.used_slots, __ATOMIC_ACQUIRE);
    for (unsigned number = 0; number < used && number < GNA_SHARED_SLOT; number++) {
        struct gna_usage_slot *slot = &gna_usage->slot[number];
        uint64_t bytes = __atomic_load_n(&slot->device[record].charged, __ATOMIC_RELAXED);
        uint32_t state = __atomic_load_n(&slot->state, __ATOMIC_ACQUIRE), pid = __atomic_load_n(&slot->pid, __ATOMIC_RELAXED);
        if (state != GNA_SLOT_PROCESS || __atomic_load_n(&slot->namespace, __ATOMIC_RELAXED) != namespace || bytes == 0) {
            continue;
        }
        if (found < room && size == sizeof(struct process_v1)) {
            ((struct process_v1 *)infos)[found] = (struct process_v1){pid, bytes};
        } else if (found < room) {
            ((struct process_v2 *)infos)[found] = (struct process_v2){pid, bytes, UINT32_MAX, UINT32_MAX};
        }
        found++;
    }
    *count = found;
    return found > room ? NVML_INSUFFICIENT_SIZE : NVML_SUCCESS;
}

static int nothing(unsigned *count) {
    if (count == NULL) {
        return NVML_INVALID_ARGUMENT;
    }
    *count = 0;
    return NVML_SUCCESS;
}

#define COMPUTE(symbol, type)                                                    \
    NVML(symbol)(device_t device, unsigned *count, type *infos);                 \
    NVML(symbol)(device_t device, unsigned *count, type *infos) {                \
        return processes(device, count, infos, sizeof(*infos));                  \
    }
#define NO_PROCESS(symbol, type)                                                 \
    NVML(symbol)(device_t device, unsigned *count, type *infos);                 \
    NVML(symbol)(device_t device, unsigned *count, type *infos) {                \
        (void)device;                                                            \
        (void)infos;                                                             \
        return nothing(count);                                                   \
    }

COMPUTE(nvmlDeviceGetComputeRunningProcesses, struct process_v1)
COMPUTE(nvmlDeviceGetComputeRunningProcesses_v2, struct process_v2)
COMPUTE(nvmlDeviceGetComputeRunningProcesses_v3, struct process_v2)
NO_PROCESS(nvmlDeviceGetGraphicsRunningProcesses, struct process_v1)
NO_PROCESS(nvmlDeviceGetGraphicsRunningProcesses_v2, struct process_v2)
NO_PROCESS(nvmlDeviceGetGraphicsRunningProcesses_v3, struct process_v2)
NO_PROCESS(nvmlDeviceGetMPSComputeRunningProcesses, struct process_v1)
NO_PROCESS(nvmlDeviceGetMPSComputeRunningProcesses_v2, struct process_v2)
NO_PROCESS(nvmlDeviceGetMPSComputeRunningProcesses_v3, struct process_v2)

void *gna_nvml_route(const char *name, void *found);
bool gna_nvml_has(const char *name);

static void *hook_of(const char *name) {
#define ROW(symbol) {#symbol, (void *)symbol}
    static const struct {
        const char *name;
        void *hook;
    } hooks[] = {
        ROW(nvmlDeviceGetMemoryInfo),
        ROW(nvmlDeviceGetMemoryInfo_v2),
        ROW(nvmlDeviceGetComputeRunningProcesses),
        ROW(nvmlDeviceGetComputeRunningProcesses_v2),
        ROW(nvmlDeviceGetComputeRunningProcesses_v3),
        ROW(nvmlDeviceGetGraphicsRunningProcesses),
        ROW(nvmlDeviceGetGraphicsRunningProcesses_v2),
        ROW(nvmlDeviceGetGraphicsRunningProcesses_v3),
        ROW(nvmlDeviceGetMPSComputeRunningProcesses),
        ROW(nvmlDeviceGetMPSComputeRunningProcesses_v2),
        ROW(nvmlDeviceGetMPSComputeRunningProcesses_v3),
    };
    for (size_t index = 0; name[0] == 'n' && index < sizeof(hooks) / sizeof(*hooks); index++) {
        if (gna_same(name, hooks[index].name)) {
            return hooks[index].hook;
        }
    }
    return NULL;
}

bool gna_nvml_has(const char *name) {
    return hook_of(name) != NULL;
}

void *gna_nvml_route(const char *name, void *found) {
    void *hook = hook_of(name), *of_driver = real(name);
    if (of_driver == NULL && found == hook) {
        return NULL;
    }
    return found == of_driver ? hook : found;
}
