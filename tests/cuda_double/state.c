/* The shared file: its mapping, its lock, the slots of its processes. */
#include "double.h"
#include "living.h"

#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

struct sim_cuda_machine *cuda_machine;
static struct sim_cuda_machine *mapped;
static pthread_mutex_t mapping = PTHREAD_MUTEX_INITIALIZER;
static int file = -1; /* never closed: the kernel drops the record locks with any descriptor of the file */
static uint32_t slot;
static int registered;
static int forked;

_Static_assert(sizeof(pthread_mutex_t) <= sizeof(((struct sim_cuda_machine *)0)->lock), "room for the mutex");

static void in_child(void) {
    forked = cuda_machine != NULL;
    cuda_machine = NULL; /* the record locks are the parent's alone */
}

/* Lock one byte for this process; the kernel frees it when the process ends. */
static int lock_byte(uint64_t byte, int wait) {
    struct flock range = cuda_slot_lock(byte, F_WRLCK);
    return fcntl(file, wait ? F_SETLKW : F_SETLK, &range);
}

static void make_mutex(struct sim_cuda_machine *machine) {
    uint64_t turn = SIM_CUDA_SLOTS;
    lock_byte(turn, 1);
    if (!__atomic_load_n(&machine->ready, __ATOMIC_ACQUIRE)) {
        pthread_mutexattr_t attributes;
        pthread_mutexattr_init(&attributes);
        pthread_mutexattr_setpshared(&attributes, PTHREAD_PROCESS_SHARED);
        pthread_mutexattr_setrobust(&attributes, PTHREAD_MUTEX_ROBUST);
        pthread_mutex_init((pthread_mutex_t *)machine->lock, &attributes);
        pthread_mutex_init((pthread_mutex_t *)machine->clock.lock, &attributes);
        pthread_mutexattr_destroy(&attributes);
        machine->symbols = symbols_checksum;
        __atomic_store_n(&machine->ready, 1, __ATOMIC_RELEASE);
    }
    struct flock range = cuda_slot_lock(turn, F_UNLCK);
    fcntl(file, F_SETLK, &range);
}

static struct sim_cuda_machine *map_file(void) {
    char beside[4096];
    const char *path = getenv(SIM_CUDA_STATE_VARIABLE);
    struct stat about;
    Dl_info here;
    if (path == NULL && dladdr((void *)&cuda_machine, &here) != 0 && here.dli_fname != NULL) {
        const char *end = strrchr(here.dli_fname, '/');
        int length = end == NULL ? 0 : (int)(end - here.dli_fname) + 1;
        snprintf(beside, sizeof(beside), "%.*s%s", length, here.dli_fname, SIM_CUDA_STATE_BESIDE_LIBRARY);
        path = beside;
    }
    if (path == NULL || (file = open(path, O_RDWR | O_CLOEXEC)) < 0) {
        return NULL;
    }
    if (fstat(file, &about) != 0 || (size_t)about.st_size != sizeof(struct sim_cuda_machine)) {
        fprintf(stderr, "CUDA double: %s is no state of this version\n", path);
        return NULL;
    }
    struct sim_cuda_machine *machine = mmap(NULL, sizeof(*machine), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (machine == MAP_FAILED) {
        return NULL;
    }
    if (machine->magic != SIM_CUDA_MAGIC || machine->version != SIM_CUDA_VERSION) {
        fprintf(stderr, "CUDA double: %s was made by another build\n", path);
        return NULL;
    }
    make_mutex(machine);
    if (machine->symbols != symbols_checksum) {
        fprintf(stderr, "CUDA double: %s belongs to a driver of another release\n", path);
        return NULL;
    }
    pthread_atfork(NULL, NULL, in_child);
    return machine;
}

struct sim_cuda_machine *state_map(void) {
    struct sim_cuda_machine *machine = __atomic_load_n(&mapped, __ATOMIC_ACQUIRE);
    if (machine == NULL) {
        pthread_mutex_lock(&mapping);
        if (mapped == NULL && file < 0) {
            __atomic_store_n(&mapped, map_file(), __ATOMIC_RELEASE);
        }
        machine = mapped;
        pthread_mutex_unlock(&mapping);
    }
    return machine;
}

int state_forked(void) {
    return forked;
}

struct sim_cuda_slot *state_slot(void) {
    return &mapped->slots[slot];
}

uint32_t state_slot_number(void) {
    return slot;
}

int state_slot_lives(uint32_t number) {
    return (registered && number == slot) || cuda_slot_holder(mapped, file, number) != 0;
}

/* Behind the slots and the turn to make the locks. */
static uint64_t task_byte(uint32_t number) {
    return SIM_CUDA_SLOTS + 1 + number;
}

int state_task_take(uint32_t number) {
    return lock_byte(task_byte(number), 0) == 0;
}

int state_task_lives(uint32_t number) {
    struct flock range = cuda_slot_lock(task_byte(number), F_WRLCK);
    return fcntl(file, F_GETLK, &range) != 0 || range.l_type != F_UNLCK;
}

void state_task_done(uint32_t number) {
    struct flock range = cuda_slot_lock(task_byte(number), F_UNLCK);
    fcntl(file, F_SETLK, &range);
}

/* The sums are made again from the slots, since the dead owner may have written only one of the two. */
static void repair(void) {
    for (uint32_t device = 0; device < mapped->device_count; device++) {
        uint64_t sum = 0;
        for (uint32_t number = 0; number < mapped->slot_high; number++) {
            for (uint32_t kind = 0; kind < SIM_CUDA_KINDS; kind++) {
                sum += mapped->slots[number].uses[device].bytes[kind];
            }
        }
        mapped->devices[device].used = sum;
    }
}

void state_lock(void) {
    pthread_mutex_t *lock = (pthread_mutex_t *)mapped->lock;
    if (pthread_mutex_lock(lock) == EOWNERDEAD) {
        repair();
        pthread_mutex_consistent(lock);
    }
}

void state_unlock(void) {
    pthread_mutex_unlock((pthread_mutex_t *)mapped->lock);
}

void state_sweep(void) {
    for (uint32_t number = 0; number < mapped->slot_high; number++) {
        struct sim_cuda_slot *dead = &mapped->slots[number];
        if (!dead->state || (registered && number == slot) || cuda_slot_holder(mapped, file, number) != 0) {
            continue;
        }
        for (uint32_t entry = 0; entry < SIM_CUDA_SHARED; entry++) {
            for (uint32_t holder = 0; mapped->shared[entry].state && holder < SIM_CUDA_HOLDERS; holder++) {
                if (mapped->shared[entry].holders[holder] == number + 1) {
                    share_leave(entry, number);
                }
            }
        }
        memset(dead->uses, 0, sizeof(dead->uses));
        dead->state = 0;
    }
    repair();
}

CUresult state_register(void) {
    struct sim_cuda_slot me = cuda_slot_of_this_process();
    state_lock();
    for (int tries = 0; tries < 2; tries++) {
        for (uint32_t number = 0; number < SIM_CUDA_SLOTS; number++) {
            struct sim_cuda_slot *free_slot = &mapped->slots[number];
            if (!free_slot->state && lock_byte(number, 0) == 0) {
                slot = number;
                registered = 1;
                *free_slot = me;
                if (number >= mapped->slot_high) {
                    mapped->slot_high = number + 1;
                }
                state_unlock();
                return CUDA_SUCCESS;
            }
        }
        state_sweep();
    }
    state_unlock();
    return CUDA_ERROR_UNKNOWN; /* more processes than there are slots */
}
