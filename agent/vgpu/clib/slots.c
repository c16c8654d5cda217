/* One slot of the usage region per process; sweep.c gives back those of dead processes. */
#include "slots.h"

#include <errno.h>
#include <pthread.h>
#include <string.h>
#include <sys/auxv.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

static struct gna_mutex lock;
static _Atomic int attached_pid;
static _Atomic(struct gna_usage_slot *) own;
struct gna_usage_slot gna_process;

uint64_t gna_now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_BOOTTIME, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

bool gna_lock_shared(pthread_mutex_t *mutex, bool *died) {
    uint32_t kind;
    memcpy(&kind, (const char *)mutex + GNA_LOCK_KIND_OFFSET, sizeof(kind));
    *died = false;
    if (kind != GNA_LOCK_KIND) {
        /* Of another kind glibc might end the process, or wait for ever. */
        gna_complain(GNA_USAGE_NAME, "one of its locks is damaged", "start the container again");
        return false;
    }
    int problem = pthread_mutex_trylock(mutex);
    uint64_t began = problem == EBUSY ? gna_now_ns() : 0;
    while (problem == EBUSY || problem == ETIMEDOUT) {
        struct timespec until;
        if (gna_now_ns() - began > GNA_LOCK_SECONDS * UINT64_C(1000000000)) {
            return false;
        }
        clock_gettime(CLOCK_REALTIME, &until);
        until.tv_sec += 1; /* in steps, so that a clock that is set back does not make it long */
        problem = pthread_mutex_timedlock(mutex, &until);
    }
    if (problem == EOWNERDEAD) {
        *died = true;
        problem = 0;
    }
    return problem == 0;
}

bool gna_lock_slots(void) {
    bool died;
    if (!gna_lock_shared(&gna_usage->header.lock, &died)) {
        return false;
    }
    if (died) {
        pthread_mutex_consistent(&gna_usage->header.lock);
    }
    return true;
}

bool gna_leave_slot(struct gna_usage_slot *slot) {
    bool is_open = gna_living_held((unsigned)(slot - gna_usage->slot));
    for (unsigned record = 0; record < gna_records(); record++) {
        struct gna_usage_device *device = &gna_usage->device[record];
        bool died;
        if (!gna_lock_shared(&device->lock, &died)) {
            return false;
        }
        __atomic_store_n(&slot->device[record].context, 0, __ATOMIC_RELAXED);
        uint64_t exported = is_open ? __atomic_load_n(&slot->exported[record], __ATOMIC_RELAXED) * GNA_GRANULE : 0;
        uint64_t charged = slot->device[record].charged;
        __atomic_store_n(&slot->device[record].charged, charged < exported ? charged : exported, __ATOMIC_RELAXED);
        device->total = gna_sum_of_slots(record);
        if (died) {
            pthread_mutex_consistent(&device->lock);
        }
        pthread_mutex_unlock(&device->lock);
    }
    gna_set_state(slot, is_open && slot->state != GNA_SLOT_SHARED ? GNA_SLOT_LEFT : GNA_SLOT_FREE);
    return true;
}

unsigned gna_used_slots(void) {
    uint64_t used = __atomic_load_n(&gna_usage->header.used_slots, __ATOMIC_RELAXED);
    return used < GNA_SHARED_SLOT ? (unsigned)used : GNA_SHARED_SLOT;
}

static void know_self(void) {
    bool gone, ending;
    struct stat status;
    const void *random = (const void *)getauxval(AT_RANDOM);
    gna_process.pid = (uint32_t)getpid();
    gna_process.state = GNA_SLOT_PROCESS;
    gna_process.start = gna_start_of(gna_process.pid, &gone, &ending);
    gna_process.namespace = stat("/proc/self/ns/pid", &status) ? 0 : (uint64_t)status.st_ino;
    gna_process.image = 0;
    if (random != NULL) {
        memcpy(&gna_process.image, random, sizeof(gna_process.image));
    }
}

static bool is_self(const struct gna_usage_slot *slot) {
    return slot->state == GNA_SLOT_PROCESS && slot->pid == gna_process.pid && slot->namespace == gna_process.namespace && slot->start == gna_process.start;
}

/* Slots are locked, and the slot is free. */
static void fill(struct gna_usage_slot *slot, const struct gna_usage_slot *with) {
    for (unsigned record = 0; record < GNA_MAX_DEVICES; record++) {
        __atomic_store_n(&slot->device[record].charged, 0, __ATOMIC_RELAXED);
        __atomic_store_n(&slot->device[record].context, 0, __ATOMIC_RELAXED);
        __atomic_store_n(&slot->exported[record], 0, __ATOMIC_RELAXED);
    }
    __atomic_store_n(&slot->pid, with->pid, __ATOMIC_RELAXED);
    __atomic_store_n(&slot->start, with->start, __ATOMIC_RELAXED);
    __atomic_store_n(&slot->namespace, with->namespace, __ATOMIC_RELAXED);
    __atomic_store_n(&slot->image, with->image, __ATOMIC_RELAXED);
    __atomic_store_n(&slot->launches, 0, __ATOMIC_RELAXED);
    __atomic_store_n(&slot->movable, 0, __ATOMIC_RELAXED);
    __atomic_store_n(&slot->held, with->held, __ATOMIC_RELAXED);
    __atomic_store_n(&slot->unheld_ns, 0, __ATOMIC_RELAXED);
    gna_set_state(slot, with->state);
}

/* Slots are locked. */
static struct gna_usage_slot *claim_own(void) {
    struct gna_usage_slot *free_slot = NULL;
    unsigned used = gna_used_slots();
    for (unsigned number = 0; number < used; number++) {
        struct gna_usage_slot *slot = &gna_usage->slot[number];
        if (is_self(slot) && slot->image != gna_process.image) {
            gna_leave_slot(slot); /* of this process before it called exec: its memory is gone */
        }
        if (slot->state == GNA_SLOT_FREE && free_slot == NULL) {
            free_slot = slot;
        }
    }
    if (free_slot == NULL && used < GNA_SHARED_SLOT) {
        free_slot = &gna_usage->slot[used];
        if (!gna_usage_back(GNA_USAGE_SLOTS + used * sizeof(*free_slot), sizeof(*free_slot))) {
            return NULL;
        }
    }
    if (free_slot == NULL) {
        return NULL;
    }
    gna_process.held = gna_living_hold((unsigned)(free_slot - gna_usage->slot)) != NULL;
    fill(free_slot, &gna_process);
    if (free_slot == &gna_usage->slot[used]) {
        __atomic_store_n(&gna_usage->header.used_slots, used + 1, __ATOMIC_RELEASE);
    }
    return free_slot;
}

/* Slots are locked, and none is free. */
static struct gna_usage_slot *join_shared(void) {
    struct gna_usage_slot *slot = &gna_usage->slot[GNA_SHARED_SLOT];
    if (!gna_usage_back(GNA_USAGE_SLOTS + GNA_SHARED_SLOT * sizeof(*slot), sizeof(*slot)) ||
        !gna_usage_back(GNA_USAGE_MEMBERS, sizeof(gna_usage->member))) {
        return NULL;
    }
    if (slot->state == GNA_SLOT_FREE) {
        fill(slot, &(struct gna_usage_slot){.state = GNA_SLOT_SHARED, .namespace = gna_process.namespace, .held = 1});
    }
    if (slot->namespace != gna_process.namespace) {
        __atomic_store_n(&slot->namespace, 0, __ATOMIC_RELAXED); /* of several: their pids tell nobody when all are dead */
    }
    for (unsigned number = 0; number < GNA_MEMBERS; number++) {
        struct gna_usage_member *member = &gna_usage->member[number];
        if (member->pid == 0 || gna_is_dead(member->pid, member->start, slot->namespace, false)) {
            __atomic_store_n(&member->start, gna_process.start, __ATOMIC_RELAXED);
            __atomic_store_n(&member->pid, gna_process.pid, __ATOMIC_RELEASE);
            __atomic_store_n(&slot->held, slot->held && gna_living_hold(GNA_SHARED_SLOT) != NULL, __ATOMIC_RELAXED);
            return slot;
        }
    }
    gna_complain(GNA_USAGE_NAME, "more processes use the GPU than can be counted", "run fewer than 10,000 at once");
    return NULL;
}

static struct gna_usage_slot *claim(void) {
    if (!gna_usage_sound()) {
        return NULL;
    }
    gna_sweep(false);
    if (!gna_lock_slots()) {
        return NULL;
    }
    struct gna_usage_slot *slot = claim_own();
    if (slot == NULL) {
        slot = join_shared();
    }
    gna_usage->header.attached += slot != NULL;
    pthread_mutex_unlock(&gna_usage->header.lock);
    return slot;
}

struct gna_usage_slot *gna_attach(void) {
    int pid = gna_self();
    if (atomic_load_explicit(&attached_pid, memory_order_acquire) == pid) {
        return atomic_load_explicit(&own, memory_order_relaxed);
    }
    if (!gna_files_open()) {
        return NULL;
    }
    gna_enter(&lock);
    struct gna_usage_slot *slot = NULL;
    if (atomic_load(&attached_pid) == pid) {
        slot = atomic_load(&own);
    } else {
        if (atomic_load(&attached_pid) != 0) {
            /* A child of fork: what its parent holds it can neither use nor free. */
            gna_forget_all();
            gna_ledger_forget();
            gna_small_forget();
            gna_pools_forget();
            gna_shares_forget();
        }
        know_self();
        slot = claim();
        if (slot != NULL) {
            atomic_store(&own, slot);
            atomic_store_explicit(&attached_pid, pid, memory_order_release);
        }
    }
    gna_leave(&lock);
    return slot;
}
