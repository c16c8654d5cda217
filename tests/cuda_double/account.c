/* Bytes: what this process has, and what the GPU has left. */
#include "double.h"

uint64_t granule(uint32_t device) {
    return cuda_machine->devices[device].granularity;
}

static uint64_t *entry_of(uint32_t device, uint32_t kind) {
    return &state_slot()->uses[device].bytes[kind];
}

/* The lock is held. A peak is believed only after the dead were swept: their memory is free already. */
static void note_peak(struct sim_cuda_device *device) {
    if (device->used > device->peak) {
        state_sweep();
        if (device->used > device->peak) {
            device->peak = device->used;
        }
    }
}

CUresult charge(uint32_t device, uint32_t kind, uint64_t bytes) {
    struct sim_cuda_device *state = &cuda_machine->devices[device];
    CUresult result = CUDA_SUCCESS;
    if (bytes == 0) {
        return CUDA_SUCCESS;
    }
    state_lock();
    if (bytes > state->total || state->used > state->total - bytes) {
        state_sweep();
    }
    if (bytes > state->total || state->used > state->total - bytes) {
        result = CUDA_ERROR_OUT_OF_MEMORY;
    } else {
        *entry_of(device, kind) += bytes;
        state->used += bytes;
        note_peak(state);
    }
    state_unlock();
    return result;
}

void discharge(uint32_t device, uint32_t kind, uint64_t bytes) {
    if (bytes == 0) {
        return;
    }
    state_lock();
    cuda_machine->devices[device].used -= bytes;
    *entry_of(device, kind) -= bytes;
    state_unlock();
}

uint64_t used_bytes(uint32_t device) {
    state_lock();
    state_sweep();
    uint64_t used = cuda_machine->devices[device].used;
    state_unlock();
    return used;
}

static uint32_t own_number(void) {
    return (uint32_t)(state_slot() - cuda_machine->slots);
}

int32_t share(uint32_t device, uint32_t kind, uint64_t bytes) {
    int32_t found = -1;
    state_lock();
    for (uint32_t number = 0; number < SIM_CUDA_SHARED; number++) {
        struct sim_cuda_shared *entry = &cuda_machine->shared[number];
        if (!entry->state) {
            *entry = (struct sim_cuda_shared){.state = 1, .generation = entry->generation + 1, .device = device,
                                              .kind = kind, .bytes = bytes, .holders = {own_number() + 1}};
            found = (int32_t)number;
            break;
        }
    }
    state_unlock();
    return found;
}

int32_t share_join(uint32_t number, uint32_t generation, uint32_t *device, uint32_t *kind, uint64_t *bytes) {
    int32_t joined = -1;
    if (number >= SIM_CUDA_SHARED) {
        return -1;
    }
    state_lock();
    state_sweep(); /* an exporter that died with nobody else holding its memory took it along */
    struct sim_cuda_shared *entry = &cuda_machine->shared[number];
    for (uint32_t holder = 0; entry->state && entry->generation == generation && holder < SIM_CUDA_HOLDERS; holder++) {
        if (entry->holders[holder] == 0) {
            entry->holders[holder] = own_number() + 1;
            *device = entry->device;
            *kind = entry->kind;
            *bytes = entry->bytes;
            joined = (int32_t)number;
            break;
        }
    }
    state_unlock();
    return joined;
}

void share_leave(uint32_t number, uint32_t slot) {
    struct sim_cuda_shared *entry = &cuda_machine->shared[number];
    for (uint32_t holder = 0; holder < SIM_CUDA_HOLDERS; holder++) {
        if (entry->holders[holder] != slot + 1) {
            continue;
        }
        uint32_t last = SIM_CUDA_HOLDERS - 1;
        for (uint32_t place = holder; place < last; place++) {
            entry->holders[place] = entry->holders[place + 1];
        }
        entry->holders[last] = 0;
        if (holder > 0) {
            return;
        }
        /* It was counted for the one that leaves: the next holder has it now, or it is free. */
        cuda_machine->slots[slot].uses[entry->device].bytes[entry->kind] -= entry->bytes;
        if (entry->holders[0] != 0) {
            cuda_machine->slots[entry->holders[0] - 1].uses[entry->device].bytes[entry->kind] += entry->bytes;
        } else {
            cuda_machine->devices[entry->device].used -= entry->bytes;
            entry->state = 0;
        }
        return;
    }
}

void share_drop(uint32_t number) {
    state_lock();
    share_leave(number, own_number());
    state_unlock();
}
