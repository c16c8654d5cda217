/* Event sets: each has its own cursor in the ring and its own registrations. */
#include "sim.h"

#include <stdlib.h>

struct nvmlEventSet_st {
    struct sim_machine *machine;
    uint64_t cursor;
    uint64_t masks[SIM_MAX_GPUS];
    uint64_t since[SIM_MAX_GPUS];
};

static uint64_t head(struct sim_machine *machine) {
    return __atomic_load_n(&machine->event_head, __ATOMIC_ACQUIRE);
}

nvmlReturn_t nvmlEventSetCreate(nvmlEventSet_t *set) {
    SIM_NEED(set != NULL);
    SIM_GATE(nvmlEventSetCreate);
    struct nvmlEventSet_st *fresh = calloc(1, sizeof(*fresh));
    if (fresh == NULL) {
        return NVML_ERROR_MEMORY;
    }
    fresh->machine = sim_machine();
    fresh->cursor = head(fresh->machine);
    *set = fresh;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlEventSetFree(nvmlEventSet_t set) {
    SIM_NEED(set != NULL);
    SIM_GATE(nvmlEventSetFree);
    free(set);
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetSupportedEventTypes(nvmlDevice_t device, unsigned long long *types) {
    SIM_NEED(types != NULL);
    SIM_GPU(nvmlDeviceGetSupportedEventTypes);
    *types = gpu->supported_events;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceRegisterEvents(nvmlDevice_t device, unsigned long long types, nvmlEventSet_t set) {
    SIM_NEED(set != NULL);
    SIM_GPU(nvmlDeviceRegisterEvents);
    SIM_OFFERED((types & ~gpu->supported_events) == 0);
    uint32_t slot = (uint32_t)sim_slot(device);
    __atomic_store_n(&set->since[slot], head(set->machine), __ATOMIC_RELEASE);
    __atomic_or_fetch(&set->masks[slot], (uint64_t)types, __ATOMIC_ACQ_REL);
    return NVML_SUCCESS;
}

/* The next event that the set asked for; 0 when there is none yet. */
static int next_event(struct nvmlEventSet_st *set, nvmlEventData_t *data) {
    uint64_t end = head(set->machine);
    if (end - set->cursor > SIM_EVENT_SLOTS) {
        set->cursor = end - SIM_EVENT_SLOTS;
    }
    while (set->cursor < end) {
        uint64_t position = set->cursor++;
        struct sim_event event = set->machine->events[position % SIM_EVENT_SLOTS];
        uint32_t slot = event.slot % SIM_MAX_GPUS;
        if (!(event.kind & set->masks[slot]) || position < set->since[slot]) {
            continue;
        }
        data->device = sim_handle(slot);
        data->eventType = event.kind;
        data->eventData = event.kind == nvmlEventTypeXidCriticalError ? event.data : 0;
        data->gpuInstanceId = event.gpu_instance;
        data->computeInstanceId = event.compute_instance;
        return 1;
    }
    return 0;
}

nvmlReturn_t nvmlEventSetWait_v2(nvmlEventSet_t set, nvmlEventData_t *data, unsigned int timeout_ms) {
    SIM_NEED(set != NULL && data != NULL);
    SIM_GATE(nvmlEventSetWait);
    int64_t deadline = timeout_ms == 0xFFFFFFFFu ? -1 : sim_now_ms() + timeout_ms;
    for (;;) {
        /* The word before the ring: an event in between makes the futex return at once. */
        uint32_t seen = __atomic_load_n(&set->machine->event_word, __ATOMIC_ACQUIRE);
        if (next_event(set, data)) {
            return NVML_SUCCESS;
        }
        int64_t left = deadline < 0 ? -1 : deadline - sim_now_ms();
        if (deadline >= 0 && left <= 0) {
            return NVML_ERROR_TIMEOUT;
        }
        sim_futex_wait(&set->machine->event_word, seen, left);
    }
}
