/* What is charged: reserved before the driver is called, released when it failed or after it has freed.
 *
 * Under the device's lock the slot is raised first and the total after it, and lowered likewise. A process that takes the
 * lock from a process that died with it adds the slots up again, so that at most that process's last step counts too
 * much, until its slot is swept. */
#include "caps.h"

#include <pthread.h>
#include <string.h>

static _Atomic uint64_t own_charged[GNA_MAX_DEVICES];
static _Atomic uint64_t owed[GNA_MAX_DEVICES]; /* freed while the lock was not to be had */

void gna_ledger_forget(void) {
    for (unsigned record = 0; record < GNA_MAX_DEVICES; record++) {
        atomic_store(&own_charged[record], 0);
        atomic_store(&owed[record], 0);
    }
}

uint64_t gna_sum_of_slots(unsigned record) {
    const struct gna_usage_slot *shared = &gna_usage->slot[GNA_SHARED_SLOT];
    bool is_free = __atomic_load_n(&shared->state, __ATOMIC_ACQUIRE) == GNA_SLOT_FREE;
    uint64_t sum = is_free ? 0 : __atomic_load_n(&shared->device[record].charged, __ATOMIC_RELAXED);
    uint64_t used = __atomic_load_n(&gna_usage->header.used_slots, __ATOMIC_ACQUIRE);
    for (uint64_t number = 0; number < used && number < GNA_SHARED_SLOT; number++) {
        sum += __atomic_load_n(&gna_usage->slot[number].device[record].charged, __ATOMIC_RELAXED);
    }
    return sum;
}

/* The device is locked. Never below zero, whatever was written into the region meanwhile. */
static void lower(struct gna_usage_device *device, struct gna_usage_slot *slot, int record, uint64_t bytes) {
    struct gna_usage_slot_device *part = &slot->device[record];
    __atomic_store_n(&part->charged, part->charged > bytes ? part->charged - bytes : 0, __ATOMIC_RELAXED);
    device->total = device->total > bytes ? device->total - bytes : 0;
    atomic_fetch_sub(&own_charged[record], bytes);
}

static struct gna_usage_device *lock_device(int record, struct gna_usage_slot *slot) {
    struct gna_usage_device *device = &gna_usage->device[record];
    bool died;
    if (!gna_usage_sound() || !gna_lock_shared(&device->lock, &died)) {
        return NULL;
    }
    if (died) {
        device->total = gna_sum_of_slots((unsigned)record);
        device->repaired++;
        pthread_mutex_consistent(&device->lock);
    }
    if (atomic_load_explicit(&owed[record], memory_order_relaxed) > 0) {
        lower(device, slot, record, atomic_exchange(&owed[record], 0));
    }
    return device;
}

static bool fits(uint64_t used, uint64_t bytes, uint64_t limit) {
    return bytes <= limit && used <= limit - bytes;
}

/* 1: charged. 0: it does not fit. -1: the lock was not to be had. */
static int try(int record, uint64_t bytes, uint64_t limit, struct gna_usage_slot *slot, bool last) {
    struct gna_usage_device *device = lock_device(record, slot);
    if (device == NULL) {
        return -1;
    }
    /* Whatever the region says, which others of the container may write: this process alone stays below the cap. */
    uint64_t own = atomic_load(&own_charged[record]), used = device->total > own ? device->total : own;
    int charged = fits(used, bytes, limit);
    if (charged) {
        __atomic_store_n(&slot->device[record].charged, slot->device[record].charged + bytes, __ATOMIC_RELAXED);
        device->total += bytes;
        atomic_fetch_add(&own_charged[record], bytes);
        if (device->total > device->peak) {
            device->peak = device->total;
        }
    } else if (last) {
        device->refused++;
    }
    pthread_mutex_unlock(&device->lock);
    return charged;
}

CUresult gna_reserve(int record, uint64_t bytes) {
    if (bytes == 0) {
        return CUDA_SUCCESS;
    }
    struct gna_usage_slot *slot = gna_attach();
    struct gna_limit limit;
    if (slot == NULL || record < 0 || !gna_limit_of((unsigned)record, &limit)) {
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    uint64_t cap = limit.memory_bytes;
    if (cap != GNA_NO_LIMIT) {
        cap += limit.forgiven_bytes; /* the agent forgives no more than the cap */
        cap = cap > limit.unseen_bytes ? cap - limit.unseen_bytes : 0;
    }
    int charged = try(record, bytes, cap, slot, false);
    if (charged == 0) {
        gna_sweep(true);
        charged = try(record, bytes, cap, slot, true);
    }
    return charged == 1 ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

bool gna_charge_present(int record, uint64_t bytes) {
    struct gna_usage_slot *slot = record < 0 ? NULL : gna_attach();
    return slot != NULL && (bytes == 0 || try(record, bytes, GNA_NO_LIMIT, slot, false) == 1);
}

void gna_release(int record, uint64_t bytes) {
    struct gna_usage_slot *slot = bytes == 0 || record < 0 ? NULL : gna_attach();
    if (slot == NULL) {
        return;
    }
    struct gna_usage_device *device = lock_device(record, slot);
    if (device == NULL) {
        atomic_fetch_add(&owed[record], bytes); /* it stays charged, the safe side, until the lock is to be had again */
        return;
    }
    lower(device, slot, record, bytes);
    pthread_mutex_unlock(&device->lock);
}

void gna_context_charged(int record, int64_t bytes) {
    struct gna_usage_slot *slot = record < 0 ? NULL : gna_attach();
    struct gna_usage_device *device = slot == NULL ? NULL : lock_device(record, slot);
    if (device != NULL) {
        __atomic_store_n(&slot->device[record].context, slot->device[record].context + (uint64_t)bytes, __ATOMIC_RELAXED);
        pthread_mutex_unlock(&device->lock);
    }
}

void gna_export_charged(int record, int64_t granules) {
    struct gna_usage_slot *slot = record < 0 ? NULL : gna_attach();
    if (slot != NULL && gna_usage_sound()) {
        __atomic_fetch_add(&slot->exported[record], (uint32_t)granules, __ATOMIC_RELAXED);
    }
}

void gna_movable_charged(int64_t bytes) {
    struct gna_usage_slot *slot = gna_attach();
    if (slot != NULL && gna_usage_sound()) {
        __atomic_fetch_add(&slot->movable, (uint64_t)bytes, __ATOMIC_RELAXED);
    }
}

void gna_charged(int record, uint64_t *used, uint64_t *limit) {
    struct gna_limit now;
    *used = 0;
    *limit = 0;
    struct gna_usage_slot *slot = gna_attach();
    if (slot == NULL || record < 0 || !gna_limit_of((unsigned)record, &now)) {
        return;
    }
    if (gna_usage_sound()) {
        gna_sweep(true);
    }
    struct gna_usage_device *device = lock_device(record, slot);
    *limit = now.memory_bytes;
    *used = now.memory_bytes;
    if (device != NULL) {
        uint64_t all = device->total + now.unseen_bytes;
        *used = all > now.forgiven_bytes ? all - now.forgiven_bytes : 0;
        pthread_mutex_unlock(&device->lock);
    }
}
