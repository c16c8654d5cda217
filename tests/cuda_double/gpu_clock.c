/* The GPUs' clock. In virtual time one thread of all processes runs at a time; when it waits, the next one that may go
 * on does so, and if there is none, the clock moves on to the instant at which one may. On the wall it just passes. */
#include "gpu_time.h"

#include <errno.h>
#include <linux/futex.h>
#include <pthread.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define EXPORT __attribute__((visibility("default")))

static _Thread_local uint32_t me; /* task plus one */
static pthread_key_t thread_end;
static pthread_once_t once = PTHREAD_ONCE_INIT;

static struct sim_cuda_clock *clock_(void) {
    struct sim_cuda_machine *machine = state_map();
    return machine == NULL ? NULL : &machine->clock;
}

int time_on(void) {
    struct sim_cuda_clock *clock = clock_();
    return clock != NULL && clock->mode != SIM_CUDA_CLOCK_OFF;
}

static void lock(struct sim_cuda_clock *clock) {
    if (pthread_mutex_lock((pthread_mutex_t *)clock->lock) == EOWNERDEAD) {
        pthread_mutex_consistent((pthread_mutex_t *)clock->lock); /* each step leaves figures that can be gone on with */
    }
}

static void unlock(struct sim_cuda_clock *clock) {
    pthread_mutex_unlock((pthread_mutex_t *)clock->lock);
}

static uint64_t wall(const struct sim_cuda_clock *clock) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return ((uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec - clock->origin_ns) / 1000 * clock->permille;
}

uint64_t time_now(void) {
    struct sim_cuda_clock *clock = clock_();
    return clock->mode == SIM_CUDA_CLOCK_VIRTUAL ? __atomic_load_n(&clock->now_ns, __ATOMIC_ACQUIRE) : wall(clock);
}

/* Lock held: all GPUs are at the instant that it is. Work of processes that were killed is gone. */
static void catch_up(struct sim_cuda_clock *clock) {
    uint64_t now = time_now();
    static uint64_t looked;
    if (clock->mode == SIM_CUDA_CLOCK_WALL && now - looked > 10000000u) {
        looked = now;
        for (uint32_t number = 0; number < clock->tenant_high; number++) {
            if (clock->tenants[number].state == 1 && !state_slot_lives(clock->tenants[number].slot)) {
                slot_ended(clock->tenants[number].slot);
            }
        }
    }
    for (uint32_t device = 0; device < state_map()->device_count; device++) {
        if (clock->devices[device].now_ns < now) {
            device_advance(device, now);
        }
    }
}

/* --- tasks in virtual time --------------------------------------------------------------------------------- */

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
        unlock(clock);
        long result = syscall(SYS_futex, &task->wake, FUTEX_WAIT, seen, &limit, NULL, 0);
        int problem = errno;
        lock(clock);
        if (result != 0 && problem == ETIMEDOUT) {
            bury(clock);
            if (clock->turn == 0) {
                next_turn(clock);
            }
        }
    }
    unlock(clock);
}

static void leave(void *unused) {
    struct sim_cuda_clock *clock = clock_();
    (void)unused;
    if (me != 0) {
        lock(clock);
        clock->tasks[me - 1].state = SIM_CUDA_TASK_FREE;
        if (clock->turn == me) {
            next_turn(clock);
        }
        state_task_done(me - 1);
        unlock(clock);
        me = 0;
    }
}

static void make_key(void) {
    pthread_key_create(&thread_end, leave);
}

static __attribute__((destructor)) void at_exit(void) {
    leave(NULL);
}

static void join(struct sim_cuda_clock *clock) {
    if (me != 0) {
        return;
    }
    pthread_once(&once, make_key);
    lock(clock);
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
static void pass_turn(struct sim_cuda_clock *clock, uint64_t until, uint32_t lane, uint64_t target) {
    join(clock);
    lock(clock);
    struct sim_cuda_task *task = &clock->tasks[me - 1];
    task->until_ns = until;
    task->lane = lane;
    task->target = target;
    task->state = SIM_CUDA_TASK_WAITING;
    next_turn(clock);
    await_turn(clock);
}

static void nap(uint64_t nanoseconds) {
    struct timespec limit = {.tv_sec = (time_t)(nanoseconds / 1000000000u), .tv_nsec = (long)(nanoseconds % 1000000000u)};
    nanosleep(&limit, NULL);
}

static void wait_lane(uint32_t lane, uint64_t target) {
    struct sim_cuda_clock *clock = clock_();
    if (clock->mode == SIM_CUDA_CLOCK_VIRTUAL) {
        pass_turn(clock, UINT64_MAX, lane, target);
        return;
    }
    for (;;) {
        lock(clock);
        catch_up(clock);
        int reached = clock->lanes[lane - 1].done >= target;
        unlock(clock);
        if (reached) {
            return;
        }
        nap(200000);
    }
}

/* --- streams and events ------------------------------------------------------------------------------------ */

void time_push(struct stream *stream, uint64_t nanoseconds, uint32_t stamp, int copies) {
    struct sim_cuda_clock *clock = clock_();
    if (clock->mode == SIM_CUDA_CLOCK_VIRTUAL) {
        join(clock);
    }
    lock(clock);
    catch_up(clock);
    if (stream->lane == 0) {
        stream->lane = lane_make(state_slot_number(), stream->base.device);
    }
    while (stream->lane != 0 && clock->lanes[stream->lane - 1].pushed - clock->lanes[stream->lane - 1].done == SIM_CUDA_ITEMS) {
        uint64_t target = clock->lanes[stream->lane - 1].done + 1;
        unlock(clock);
        wait_lane(stream->lane, target); /* as the driver: its queue is full */
        lock(clock);
    }
    if (stream->lane != 0) {
        struct sim_cuda_lane *lane = &clock->lanes[stream->lane - 1];
        lane->items[lane->pushed % SIM_CUDA_ITEMS] = (struct sim_cuda_item){
            .left_ns = nanoseconds, .stamp = stamp, .generation = stamp == 0 ? 0 : clock->stamps[stamp - 1].generation, .copies = (uint32_t)copies};
        lane->pushed++;
        if (nanoseconds == 0) {
            catch_up(clock);
            device_advance(stream->base.device, time_now()); /* at once, where nothing is before it */
        }
    }
    unlock(clock);
}

uint32_t time_stamp(uint32_t stamp) {
    struct sim_cuda_clock *clock = clock_();
    lock(clock);
    for (uint32_t number = 0; number < SIM_CUDA_STAMPS && stamp == 0; number++) {
        if (!clock->stamps[number].taken) {
            clock->stamps[number].taken = 1;
            stamp = number + 1;
        }
    }
    if (stamp != 0) {
        clock->stamps[stamp - 1].generation++;
        clock->stamps[stamp - 1].at_ns = 0;
    }
    unlock(clock);
    return stamp;
}

void time_stamp_free(uint32_t stamp) {
    struct sim_cuda_clock *clock = clock_();
    lock(clock);
    clock->stamps[stamp - 1].generation++;
    clock->stamps[stamp - 1].taken = 0;
    unlock(clock);
}

uint64_t time_stamped(uint32_t stamp) {
    struct sim_cuda_clock *clock = clock_();
    lock(clock);
    catch_up(clock);
    uint64_t at = clock->stamps[stamp - 1].at_ns;
    unlock(clock);
    return at;
}

int time_idle(const struct stream *stream) {
    struct sim_cuda_clock *clock = clock_();
    if (stream->lane == 0) {
        return 1;
    }
    lock(clock);
    catch_up(clock);
    int idle = clock->lanes[stream->lane - 1].done == clock->lanes[stream->lane - 1].pushed;
    unlock(clock);
    return idle;
}

/* A lane with work in it stays until its process ends. */
void time_stream_gone(const struct stream *stream) {
    struct sim_cuda_clock *clock = clock_();
    if (stream->lane != 0) {
        lock(clock);
        if (clock->lanes[stream->lane - 1].done == clock->lanes[stream->lane - 1].pushed) {
            clock->lanes[stream->lane - 1].tenant = 0;
        }
        unlock(clock);
    }
}

void time_wait_stream(const struct stream *stream) {
    if (stream->lane != 0 && !time_idle(stream)) {
        wait_lane(stream->lane, clock_()->lanes[stream->lane - 1].pushed);
    }
}

void time_wait_stamp(uint32_t stamp) {
    struct sim_cuda_clock *clock = clock_();
    while (time_stamped(stamp) == 0) {
        /* In virtual time: until the next thing of the GPUs ends, whichever it is. */
        if (clock->mode == SIM_CUDA_CLOCK_VIRTUAL) {
            lock(clock);
            uint64_t next = UINT64_MAX;
            for (uint32_t device = 0; device < state_map()->device_count; device++) {
                uint64_t ends = device_next(device);
                next = ends < next ? ends : next;
            }
            unlock(clock);
            pass_turn(clock, next, 0, 0);
        } else {
            nap(200000);
        }
    }
}

void time_wait_device(uint32_t device) {
    struct sim_cuda_clock *clock = clock_();
    for (uint32_t number = 0; number < clock->lane_high; number++) {
        const struct sim_cuda_tenant *tenant = &clock->tenants[(clock->lanes[number].tenant + SIM_CUDA_TENANTS - 1) % SIM_CUDA_TENANTS];
        if (clock->lanes[number].tenant != 0 && tenant->slot == state_slot_number() && tenant->device == device) {
            wait_lane(number + 1, clock->lanes[number].pushed);
        }
    }
}

/* --- for the clock of the enforcement library, and for programs that want to sleep in the GPUs' time ---------- */

EXPORT uint64_t gna_sim_now(void);
EXPORT void gna_sim_wait(const uint32_t *word, uint32_t seen, uint64_t until);

EXPORT uint64_t gna_sim_now(void) {
    return time_on() ? time_now() : now_ns();
}

/* Until the instant; on the wall also until the word is another one and its futex is woken. */
EXPORT void gna_sim_wait(const uint32_t *word, uint32_t seen, uint64_t until) {
    struct sim_cuda_clock *clock = clock_();
    uint64_t now = gna_sim_now();
    if (time_on() && clock->mode == SIM_CUDA_CLOCK_VIRTUAL) {
        pass_turn(clock, until, 0, 0);
    } else if (until > now) {
        uint64_t left = time_on() ? (until - now) / clock->permille * 1000 : until - now;
        struct timespec limit = {.tv_sec = (time_t)(left / 1000000000u), .tv_nsec = (long)(left % 1000000000u)};
        syscall(SYS_futex, word, FUTEX_WAIT, seen, &limit, NULL, 0);
    }
}
