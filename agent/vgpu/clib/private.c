/* Locks of this process, and its table of what it holds. */
#include "caps.h"

#include <sched.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#ifndef MADV_WIPEONFORK
#define MADV_WIPEONFORK 18
#endif

/* The pid lies in a page that a child of fork finds empty, since a system call at each lock is what costs most. */
int gna_self(void) {
    static _Atomic(int *) page;
    static _Atomic bool unknown;
    int *kept = atomic_load_explicit(&page, memory_order_acquire);
    int pid = kept == NULL ? 0 : __atomic_load_n(kept, __ATOMIC_RELAXED);
    if (__builtin_expect(pid != 0, 1)) {
        return pid;
    }
    pid = getpid();
    if (kept == NULL && atomic_load_explicit(&unknown, memory_order_relaxed)) {
        return pid;
    }
    if (kept == NULL) {
        void *fresh = mmap(NULL, sizeof(int), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        int *none = NULL;
        if (fresh == MAP_FAILED) {
            return pid;
        }
        if (madvise(fresh, sizeof(int), MADV_WIPEONFORK)) {
            munmap(fresh, sizeof(int));
            atomic_store(&unknown, true); /* to kernels before 4.14 */
            return pid;
        }
        kept = atomic_compare_exchange_strong(&page, &none, (int *)fresh) ? fresh : none;
        if (kept != fresh) {
            munmap(fresh, sizeof(int));
        }
    }
    __atomic_store_n(kept, pid, __ATOMIC_RELAXED);
    return pid;
}

void gna_enter(struct gna_mutex *mutex) {
    int self = gna_self(), holder = 0;
    for (unsigned tries = 0; !atomic_compare_exchange_weak_explicit(&mutex->holder, &holder, self, memory_order_acquire,
                                                                    memory_order_relaxed);
         tries++) {
        /* A parent that forked while another of its threads was in here left the child its pid. */
        if (holder != 0 && holder != self &&
            atomic_compare_exchange_strong_explicit(&mutex->holder, &holder, self, memory_order_acquire, memory_order_relaxed)) {
            return;
        }
        holder = 0;
        if (tries > 1000) {
            /* A thread of real-time priority must not keep the holder from the processor. */
            nanosleep(&(struct timespec){.tv_nsec = 50000}, NULL);
        } else if (tries > 100) {
            sched_yield();
        }
    }
}

void gna_leave(struct gna_mutex *mutex) {
    atomic_store_explicit(&mutex->holder, 0, memory_order_release);
}

/* Open addressing; a removed entry keeps its place as GNA_NONE with a key, an empty place has neither. */
static struct gna_mutex lock;
static struct gna_entry *table;
static size_t places, taken;

static size_t home(uint64_t kind, uint64_t key) {
    uint64_t mixed = (key ^ kind << 56) * UINT64_C(0x9e3779b97f4a7c15);
    return (size_t)(mixed >> 20);
}

static bool is_empty(const struct gna_entry *entry) {
    return entry->kind == GNA_NONE && entry->flag == 0;
}

static struct gna_entry *find(uint64_t kind, uint64_t key) {
    for (size_t step = 0; step < places; step++) {
        struct gna_entry *entry = &table[(home(kind, key) + step) & (places - 1)];
        if (is_empty(entry)) {
            break;
        }
        if (entry->kind == kind && entry->key == key) {
            return entry;
        }
    }
    return NULL;
}

static void insert(const struct gna_entry *entry) {
    size_t place = home(entry->kind, entry->key) & (places - 1);
    while (table[place].kind != GNA_NONE) {
        place = (place + 1) & (places - 1);
    }
    taken += is_empty(&table[place]);
    table[place] = *entry;
}

static bool grow(void) {
    struct gna_entry *before = table;
    size_t count = places, live = 0;
    for (size_t place = 0; place < count; place++) {
        live += before[place].kind != GNA_NONE;
    }
    size_t wanted = count == 0 ? 1024 : live * 2 >= count ? count * 2 : count;
    void *fresh = mmap(NULL, wanted * sizeof(*table), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (fresh == MAP_FAILED) {
        return false;
    }
    table = fresh;
    places = wanted;
    taken = 0;
    for (size_t place = 0; place < count; place++) {
        if (before[place].kind != GNA_NONE) {
            insert(&before[place]);
        }
    }
    if (before != NULL) {
        munmap(before, count * sizeof(*table));
    }
    return true;
}

bool gna_put(const struct gna_entry *entry) {
    bool done = true;
    gna_enter(&lock);
    struct gna_entry *found = find(entry->kind, entry->key);
    if (found != NULL) {
        *found = *entry;
    } else {
        done = (taken + 1) * 4 <= places * 3 || grow();
        if (done) {
            insert(entry);
        }
    }
    gna_leave(&lock);
    return done;
}

static bool look(enum gna_kind kind, uint64_t key, struct gna_entry *entry, bool remove) {
    gna_enter(&lock);
    struct gna_entry *found = find(kind, key);
    if (found != NULL) {
        *entry = *found;
        if (remove) {
            *found = (struct gna_entry){.flag = 1};
        }
    }
    gna_leave(&lock);
    return found != NULL;
}

bool gna_get(enum gna_kind kind, uint64_t key, struct gna_entry *entry) {
    return look(kind, key, entry, false);
}

bool gna_take(enum gna_kind kind, uint64_t key, struct gna_entry *entry) {
    return look(kind, key, entry, true);
}

bool gna_next(enum gna_kind kind, size_t *place, struct gna_entry *entry) {
    bool found = false;
    gna_enter(&lock);
    for (; *place < places && !found; (*place)++) {
        if (table[*place].kind == kind) {
            *entry = table[*place];
            found = true;
        }
    }
    gna_leave(&lock);
    return found;
}

void gna_forget_all(void) {
    gna_enter(&lock);
    if (table != NULL) {
        memset(table, 0, places * sizeof(*table));
    }
    taken = 0;
    gna_leave(&lock);
}
