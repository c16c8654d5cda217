/* One slot of the usage region per process; those of dead processes are given back by the living. */
#include "caps.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/auxv.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

/* Of the whole container, as GNA_SWEEP_NS: 300 processes that are looked up in /proc cost 3 ms. */
static const uint64_t THOROUGH_NS = 50000000;
/* After exec, in which the driver frees what the process had, though nobody sees when. */
static const uint64_t AFTER_EXEC_NS = 2000000000;
static const uint64_t EXITING = 4; /* PF_EXITING of the kernel, in field 9 of /proc/<pid>/stat */

static struct gna_mutex lock;
static _Atomic int attached_pid;
static _Atomic(struct gna_usage_slot *) own;
static struct gna_usage_slot self; /* who this process is */

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

static bool lock_slots(void) {
    bool died;
    if (!gna_lock_shared(&gna_usage->header.lock, &died)) {
        return false;
    }
    if (died) {
        pthread_mutex_consistent(&gna_usage->header.lock);
    }
    return true;
}

/* Field 22 of /proc/<pid>/stat, behind a name that may hold anything; 0 when it cannot be read. `*gone`: a zombie, and
 * not only the first thread, which may end before the others: field 20 counts it and those that are left. `*ending`: it
 * may still have its memory. */
static uint64_t start_of(uint32_t pid, bool *gone, bool *ending) {
    char path[32], text[1024];
    *gone = false;
    *ending = true;
    snprintf(path, sizeof(path), "/proc/%u/stat", pid);
    int file = open(path, O_RDONLY | O_CLOEXEC);
    if (file < 0) {
        return 0;
    }
    ssize_t length = read(file, text, sizeof(text) - 1);
    close(file);
    text[length > 0 ? length : 0] = 0;
    char *at = strrchr(text, ')');
    if (at == NULL || at[1] != ' ') {
        return 0;
    }
    bool ended = at[2] == 'Z' || at[2] == 'X';
    uint64_t threads = 0;
    for (int field = 3; field < 22 && at != NULL; field++) {
        threads = field == 20 ? strtoull(at + 2, NULL, 10) : threads;
        *ending = field == 9 ? (strtoull(at + 2, NULL, 10) & EXITING) != 0 : *ending;
        at = strchr(at + 2, ' ');
        at = at == NULL ? NULL : at - 1;
    }
    *gone = ended && threads <= 1;
    return at == NULL ? 0 : strtoull(at + 2, NULL, 10);
}

static bool is_dead(uint32_t pid, uint64_t start, uint64_t namespace, bool thorough) {
    if (namespace != self.namespace) {
        return false; /* its pid means nothing here */
    }
    if (kill((pid_t)pid, 0) && errno == ESRCH) {
        return true;
    }
    if (!thorough) {
        return false;
    }
    bool gone, ending;
    uint64_t now = start_of(pid, &gone, &ending);
    return gone || (now != 0 && start != 0 && now != start);
}

/* Of a process of the own PID namespace: pid and start are those of before, and only the lock shows that the memory is gone. */
static bool has_called_exec(struct gna_usage_slot *slot, const struct gna_usage_slot *seen, unsigned number) {
    bool gone, ending = false;
    uint64_t now = gna_now_ns();
    if (!seen->held || gna_living_held(number)) {
        now = 0;
    } else if (seen->unheld_ns != 0 && seen->unheld_ns <= now) { /* one that lies ahead was written by somebody else */
        start_of(seen->pid, &gone, &ending);
        return now - seen->unheld_ns >= AFTER_EXEC_NS && !ending;
    }
    if (seen->unheld_ns != now) {
        __atomic_store_n(&slot->unheld_ns, now, __ATOMIC_RELAXED);
    }
    return false;
}

/* Of processes of another PID namespace, nested or not, the lock on the region alone decides. */
static bool has_died(struct gna_usage_slot *slot, const struct gna_usage_slot *seen, unsigned number, bool thorough) {
    if (seen->namespace != self.namespace) {
        return seen->held && !gna_living_held(number);
    }
    return is_dead(seen->pid, seen->start, seen->namespace, thorough) || (thorough && has_called_exec(slot, seen, number));
}

/* Slots are locked. What the slot had charged goes back, device by device. */
static bool empty(struct gna_usage_slot *slot) {
    for (unsigned record = 0; record < gna_records(); record++) {
        struct gna_usage_device *device = &gna_usage->device[record];
        bool died;
        if (!gna_lock_shared(&device->lock, &died)) {
            return false;
        }
        slot->device[record].context = 0;
        slot->device[record].charged = 0;
        device->total = gna_sum_of_slots(record);
        if (died) {
            pthread_mutex_consistent(&device->lock);
        }
        pthread_mutex_unlock(&device->lock);
    }
    return true;
}

static unsigned used_slots(void) {
    uint64_t used = __atomic_load_n(&gna_usage->header.used_slots, __ATOMIC_RELAXED);
    return used < GNA_SHARED_SLOT ? (unsigned)used : GNA_SHARED_SLOT;
}

static void sweep_shared(bool thorough) {
    struct gna_usage_slot *slot = &gna_usage->slot[GNA_SHARED_SLOT];
    if (slot->state != GNA_SLOT_SHARED) {
        return;
    }
    if (slot->held && gna_living_held(GNA_SHARED_SLOT)) {
        return;
    }
    for (unsigned number = 0; number < GNA_MEMBERS && !slot->held; number++) {
        struct gna_usage_member *member = &gna_usage->member[number];
        if (member->pid != 0 && !is_dead(member->pid, member->start, slot->namespace, thorough)) {
            return;
        }
    }
    if (lock_slots()) {
        bool joined = slot->held && gna_living_held(GNA_SHARED_SLOT); /* meanwhile */
        if (slot->state == GNA_SLOT_SHARED && !joined && empty(slot)) {
            memset(gna_usage->member, 0, sizeof(gna_usage->member));
            slot->state = GNA_SLOT_FREE;
        }
        pthread_mutex_unlock(&gna_usage->header.lock);
    }
}

/* One of several that want to at once. */
static bool is_due(uint64_t *last_ns, uint64_t now, uint64_t after) {
    uint64_t last = __atomic_load_n(last_ns, __ATOMIC_RELAXED);
    /* A time that lies ahead was written by somebody else. */
    return (last > now || now - last >= after) && __atomic_compare_exchange_n(last_ns, &last, now, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
}

void gna_sweep(bool thorough) {
    uint64_t now = gna_now_ns();
    thorough = thorough && is_due(&gna_usage->header.thorough_ns, now, THOROUGH_NS);
    if (!is_due(&gna_usage->header.swept_ns, now, GNA_SWEEP_NS) && !thorough) {
        return;
    }
    for (unsigned number = 0; number < used_slots(); number++) {
        struct gna_usage_slot *slot = &gna_usage->slot[number], seen = *slot;
        /* Looked at without the lock, and again under it: a process that called exec may have claimed it again. */
        if (seen.state != GNA_SLOT_PROCESS || !has_died(slot, &seen, number, thorough)) {
            continue;
        }
        if (!lock_slots()) {
            return; /* nor would it be had for the next one, and each try takes seconds */
        }
        bool had = true;
        if (slot->state == GNA_SLOT_PROCESS && slot->pid == seen.pid && slot->start == seen.start && slot->image == seen.image) {
            had = empty(slot);
            slot->state = had ? GNA_SLOT_FREE : slot->state;
        }
        pthread_mutex_unlock(&gna_usage->header.lock);
        if (!had) {
            return;
        }
    }
    sweep_shared(thorough);
}

static void know_self(void) {
    bool gone, ending;
    struct stat status;
    const void *random = (const void *)getauxval(AT_RANDOM);
    self.pid = (uint32_t)getpid();
    self.state = GNA_SLOT_PROCESS;
    self.start = start_of(self.pid, &gone, &ending);
    self.namespace = stat("/proc/self/ns/pid", &status) ? 0 : (uint64_t)status.st_ino;
    self.image = 0;
    if (random != NULL) {
        memcpy(&self.image, random, sizeof(self.image));
    }
}

static bool is_self(const struct gna_usage_slot *slot) {
    return slot->state == GNA_SLOT_PROCESS && slot->pid == self.pid && slot->namespace == self.namespace && slot->start == self.start;
}

/* Slots are locked. */
static struct gna_usage_slot *claim_own(void) {
    struct gna_usage_slot *free_slot = NULL;
    unsigned used = used_slots();
    for (unsigned number = 0; number < used; number++) {
        struct gna_usage_slot *slot = &gna_usage->slot[number];
        if (is_self(slot) && slot->image != self.image && empty(slot)) {
            slot->state = GNA_SLOT_FREE; /* of this process before it called exec: its memory is gone */
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
    self.held = gna_living_hold((unsigned)(free_slot - gna_usage->slot));
    *free_slot = (struct gna_usage_slot){0};
    *free_slot = self;
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
        *slot = (struct gna_usage_slot){.state = GNA_SLOT_SHARED, .namespace = self.namespace, .held = 1};
    }
    if (slot->namespace != self.namespace) {
        slot->namespace = 0; /* of several: their pids tell nobody when all are dead */
    }
    for (unsigned number = 0; number < GNA_MEMBERS; number++) {
        struct gna_usage_member *member = &gna_usage->member[number];
        if (member->pid == 0 || is_dead(member->pid, member->start, slot->namespace, false)) {
            *member = (struct gna_usage_member){.pid = self.pid, .start = self.start};
            slot->held = slot->held && gna_living_hold(GNA_SHARED_SLOT);
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
    if (!lock_slots()) {
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
