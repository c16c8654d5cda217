/* Virtual time. One thread of all processes runs at a time; when it waits, the next one that may go on does so, and if
 * there is none, the clock moves on to the instant at which one may. */
#include "gpu_time.h"

#include <errno.h>
#include <linux/futex.h>
#include <pthread.h>
#include <stdint.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

static _Thread_local uint32_t me; /* task plus one */
static pthread_key_t thread_end;
static pthread_once_t once = PTHREAD_ONCE_INIT;

static void wake(uint32_t *word) {
    __atomic_fetch_add(word, 1, __ATOMIC_RELEASE);
    syscall(SYS_futex, word, FUTEX_WAKE, INT32_MAX, NULL, NULL, 0);
}

static int may_go(const struct sim_cuda_clock *clock, const struct sim_cuda_task *task) {
    if (task->state != SIM_CUDA_TASK_WAITING) {
        return 0;
    }
    return task->until_ns <= clock->now_ns || (task->lane != 0 && clock->lanes[task->lane - 1].done >= task->target);
}

/* Lock held, nobody runs: somebody does afterwards, unless nobody is there. */
static void next_turn(struct sim_cuda_clock *clock) {
    uint32_t last = clock->turn;
    clock->turn = 0;
    if (clock->joined < clock->expected) {
        return;
    }
    for (;;) {
        uint64_t next = UINT64_MAX;
        for (uint32_t step = 0; step < clock->task_high; step++) {
            uint32_t number = (last + step) % clock->task_high;
            struct sim_cuda_task *task = &clock->tasks[number];
            if (may_go(clock, task)) {
                task->state = SIM_CUDA_TASK_RUNNING;
                clock->turn = number + 1;
                if (number + 1 != me) {
                    wake(&task->wake);
                }
                return;
            }
            if (task->state == SIM_CUDA_TASK_WAITING && task->until_ns < next) {
                next = task->until_ns;
            }
        }
        for (uint32_t device = 0; device < state_map()->device_count; device++) {
            uint64_t ends = device_next(device);
            next = ends < next ? ends : next;
        }
        if (next == UINT64_MAX) {
            return;
        }
        for (uint32_t device = 0; device < state_map()->device_count; device++) {
            device_advance(device, next);
        }
        __atomic_store_n(&clock->now_ns, next, __ATOMIC_RELEASE);
    }
}

/* A task whose process was killed neither runs nor waits. Lock held. */
static void bury(struct sim_cuda_clock *clock) {
    for (uint32_t number = 0; number < clock->task_high; number++) {
        struct sim_cuda_task *task = &clock->tasks[number];
        if (task->state == SIM_CUDA_TASK_FREE || task->pid == (uint32_t)getpid() || state_task_lives(number)) {
            continue;
        }
        task->state = SIM_CUDA_TASK_FREE;
        for (uint32_t tenant = 0; tenant < clock->tenant_high; tenant++) {
            if (clock->tenants[tenant].state == 1 && !state_slot_lives(clock->tenants[tenant].slot)) {
                slot_ended(clock->tenants[tenant].slot);
            }
        }
        if (clock->turn == number + 1) {
            next_turn(clock);
        }
    }
}

/* Lock held when called, and not afterwards. */
static void await_turn(struct sim_cuda_clock *clock) {
    struct sim_cuda_task *task = &clock->tasks[me - 1];
    while (clock->turn != me) {
        uint32_t seen = __atomic_load_n(&task->wake, __ATOMIC_ACQUIRE);
        struct timespec limit = {.tv_nsec = 100000000};
        time_unlock(clock);
        long result = syscall(SYS_futex, &task->wake, FUTEX_WAIT, seen, &limit, NULL, 0);
        int problem = errno;
        time_lock(clock);
        if (result != 0 && problem == ETIMEDOUT) {
            bury(clock);
            if (clock->turn == 0) {
                next_turn(clock);
            }
        }
    }
    time_unlock(clock);
}

static void leave(void *unused) {
    struct sim_cuda_clock *clock = time_clock();
    (void)unused;
    if (me != 0) {
        time_lock(clock);
        clock->tasks[me - 1].state = SIM_CUDA_TASK_FREE;
        if (clock->turn == me) {
            next_turn(clock);
        }
        state_task_done(me - 1);
        time_unlock(clock);
        me = 0;
    }
}

static void make_key(void) {
    pthread_key_create(&thread_end, leave);
}

static __attribute__((destructor)) void at_exit(void) {
    leave(NULL);
}

void time_join(struct sim_cuda_clock *clock) {
    if (me != 0) {
        return;
    }
    pthread_once(&once, make_key);
    time_lock(clock);
    for (uint32_t number = 0; number < SIM_CUDA_TASKS && me == 0; number++) {
        struct sim_cuda_task *task = &clock->tasks[number];
        if (task->state == SIM_CUDA_TASK_FREE && state_task_take(number)) {
            *task = (struct sim_cuda_task){.state = SIM_CUDA_TASK_WAITING, .pid = (uint32_t)getpid(), .wake = task->wake};
            me = number + 1;
            clock->task_high = me > clock->task_high ? me : clock->task_high;
        }
    }
    clock->joined++;
    pthread_setspecific(thread_end, (void *)1);
    if (clock->turn == 0) {
        next_turn(clock);
    }
    await_turn(clock);
}

/* Lets others run until the instant, or until a lane has got to the target. */
void time_pass_turn(struct sim_cuda_clock *clock, uint64_t until, uint32_t lane, uint64_t target) {
    time_join(clock);
    time_lock(clock);
    struct sim_cuda_task *task = &clock->tasks[me - 1];
    task->until_ns = until;
    task->lane = lane;
    task->target = target;
    task->state = SIM_CUDA_TASK_WAITING;
    next_turn(clock);
    await_turn(clock);
}
