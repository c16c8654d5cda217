/* Slots of dead processes, given back by the living. */
#include "slots.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* Of the whole container, as GNA_SWEEP_NS: 300 processes that are looked up in /proc cost 3 ms. */
static const uint64_t THOROUGH_NS = 50000000;
/* After exec, in which the driver frees what the process had, though nobody sees when. */
static const uint64_t AFTER_EXEC_NS = 2000000000;
static const uint64_t EXITING = 4; /* PF_EXITING of the kernel, in field 9 of /proc/<pid>/stat */

/* Behind a name that may hold anything. A zombie is not one whose first thread alone has ended: field 20 counts it and
 * those that are left. */
uint64_t gna_start_of(uint32_t pid, bool *gone, bool *ending) {
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

bool gna_is_dead(uint32_t pid, uint64_t start, uint64_t namespace, bool thorough) {
    if (namespace != gna_process.namespace) {
        return false; /* its pid means nothing here */
    }
    if (kill((pid_t)pid, 0) && errno == ESRCH) {
        return true;
    }
    if (!thorough) {
        return false;
    }
    bool gone, ending;
    uint64_t now = gna_start_of(pid, &gone, &ending);
    return gone || (now != 0 && start != 0 && now != start);
}

/* Of a process of the own PID namespace: pid and start are those of before, and only the lock shows that the memory is gone. */
static bool has_called_exec(struct gna_usage_slot *slot, const struct gna_usage_slot *seen, unsigned number) {
    bool gone, ending = false;
    uint64_t now = gna_now_ns();
    if (!seen->held || gna_living_held(number)) {
        now = 0;
    } else if (seen->unheld_ns != 0 && seen->unheld_ns <= now) { /* one that lies ahead was written by somebody else */
        gna_start_of(seen->pid, &gone, &ending);
        return now - seen->unheld_ns >= AFTER_EXEC_NS && !ending;
    }
    if (seen->unheld_ns != now) {
        __atomic_store_n(&slot->unheld_ns, now, __ATOMIC_RELAXED);
    }
    return false;
}

/* Of processes of another PID namespace, nested or not, the lock on the region alone decides. */
static bool has_died(struct gna_usage_slot *slot, const struct gna_usage_slot *seen, unsigned number, bool thorough) {
    if (seen->namespace != gna_process.namespace) {
        return seen->held && !gna_living_held(number);
    }
    return gna_is_dead(seen->pid, seen->start, seen->namespace, thorough) || (thorough && has_called_exec(slot, seen, number));
}

static bool shared_has_ended(bool thorough) {
    const struct gna_usage_slot *slot = &gna_usage->slot[GNA_SHARED_SLOT];
    if (__atomic_load_n(&slot->held, __ATOMIC_RELAXED)) {
        return !gna_living_held(GNA_SHARED_SLOT);
    }
    uint64_t namespace = __atomic_load_n(&slot->namespace, __ATOMIC_RELAXED);
    for (unsigned number = 0; number < GNA_MEMBERS; number++) {
        const struct gna_usage_member *member = &gna_usage->member[number];
        uint32_t pid = __atomic_load_n(&member->pid, __ATOMIC_ACQUIRE);
        if (pid != 0 && !gna_is_dead(pid, __atomic_load_n(&member->start, __ATOMIC_RELAXED), namespace, thorough)) {
            return false;
        }
    }
    return true;
}

static void sweep_shared(bool thorough) {
    struct gna_usage_slot *slot = &gna_usage->slot[GNA_SHARED_SLOT];
    if (__atomic_load_n(&slot->state, __ATOMIC_ACQUIRE) != GNA_SLOT_SHARED || !shared_has_ended(thorough) || !gna_lock_slots()) {
        return;
    }
    /* Again under the lock: somebody may have joined. */
    if (slot->state == GNA_SLOT_SHARED && shared_has_ended(thorough) && gna_leave_slot(slot)) {
        memset(gna_usage->member, 0, sizeof(gna_usage->member));
    }
    pthread_mutex_unlock(&gna_usage->header.lock);
}

/* Of a slot that others may be writing: its state first, since that is written last. */
static struct gna_usage_slot look(const struct gna_usage_slot *slot) {
    struct gna_usage_slot seen = {.state = __atomic_load_n(&slot->state, __ATOMIC_ACQUIRE)};
    seen.pid = __atomic_load_n(&slot->pid, __ATOMIC_RELAXED);
    seen.start = __atomic_load_n(&slot->start, __ATOMIC_RELAXED);
    seen.namespace = __atomic_load_n(&slot->namespace, __ATOMIC_RELAXED);
    seen.image = __atomic_load_n(&slot->image, __ATOMIC_RELAXED);
    seen.held = __atomic_load_n(&slot->held, __ATOMIC_RELAXED);
    seen.unheld_ns = __atomic_load_n(&slot->unheld_ns, __ATOMIC_RELAXED);
    return seen;
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
    for (unsigned number = 0; number < gna_used_slots(); number++) {
        struct gna_usage_slot *slot = &gna_usage->slot[number], seen = look(slot);
        /* Looked at without the lock, and again under it: a process that called exec may have claimed it again. */
        bool has_ended = seen.state == GNA_SLOT_LEFT ? !gna_living_held(number)
                                                     : seen.state == GNA_SLOT_PROCESS && has_died(slot, &seen, number, thorough);
        if (!has_ended) {
            continue;
        }
        if (!gna_lock_slots()) {
            return; /* nor would it be had for the next one, and each try takes seconds */
        }
        bool had = true;
        if (slot->state == seen.state && slot->pid == seen.pid && slot->start == seen.start && slot->image == seen.image) {
            had = gna_leave_slot(slot);
        }
        pthread_mutex_unlock(&gna_usage->header.lock);
        if (!had) {
            return;
        }
    }
    sweep_shared(thorough);
}

