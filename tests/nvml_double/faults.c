/* Injected faults: delays, hangs and failures, in this order, as the Python face does them. */
#define _GNU_SOURCE
#include "sim.h"

#include <errno.h>
#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

int64_t sim_now_ms(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000 + now.tv_nsec / 1000000;
}

int sim_futex_wait(uint32_t *word, uint32_t expected, int64_t timeout_ms) {
    struct timespec limit = {.tv_sec = timeout_ms / 1000, .tv_nsec = timeout_ms % 1000 * 1000000};
    long result = syscall(SYS_futex, word, FUTEX_WAIT, expected, timeout_ms < 0 ? NULL : &limit, NULL, 0);
    return !(result == -1 && errno == ETIMEDOUT);
}

static int matches(const struct sim_fault *fault, enum sim_call call, int32_t slot) {
    return __atomic_load_n(&fault->kind, __ATOMIC_ACQUIRE) != SIM_FAULT_NONE &&
           (fault->call == -1 || fault->call == (int32_t)call) && (fault->slot == -1 || fault->slot == slot);
}

static void hang(struct sim_machine *machine, struct sim_fault *fault) {
    uint32_t ticket = fault->ticket;
    for (;;) {
        uint32_t seen = __atomic_load_n(&machine->fault_word, __ATOMIC_ACQUIRE);
        if (__atomic_load_n(&fault->kind, __ATOMIC_ACQUIRE) != SIM_FAULT_HANG || fault->ticket != ticket) {
            return;
        }
        sim_futex_wait(&machine->fault_word, seen, -1);
    }
}

/* One of a counted number of failures, or one of endlessly many. */
static int use_up(struct sim_fault *fault) {
    int32_t left = __atomic_load_n(&fault->remaining, __ATOMIC_ACQUIRE);
    if (left < 0) {
        return 1;
    }
    while (left > 0) {
        if (__atomic_compare_exchange_n(&fault->remaining, &left, left - 1, 0, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE)) {
            if (left == 1) {
                __atomic_store_n(&fault->kind, SIM_FAULT_NONE, __ATOMIC_RELEASE);
            }
            return 1;
        }
    }
    return 0;
}

nvmlReturn_t sim_strike(struct sim_machine *machine, enum sim_call call, int32_t slot) {
    if (machine->fault_tickets == 0) {
        return NVML_SUCCESS;
    }
    for (uint32_t number = 0; number < SIM_FAULT_SLOTS; number++) {
        struct sim_fault *fault = &machine->faults[number];
        if (matches(fault, call, slot) && fault->kind == SIM_FAULT_SLOW) {
            struct timespec pause = {.tv_sec = fault->milliseconds / 1000,
                                     .tv_nsec = fault->milliseconds % 1000 * 1000000L};
            nanosleep(&pause, NULL);
        }
    }
    for (uint32_t number = 0; number < SIM_FAULT_SLOTS; number++) {
        struct sim_fault *fault = &machine->faults[number];
        if (matches(fault, call, slot) && fault->kind == SIM_FAULT_HANG) {
            hang(machine, fault);
        }
    }
    for (uint32_t number = 0; number < SIM_FAULT_SLOTS; number++) {
        struct sim_fault *fault = &machine->faults[number];
        if (matches(fault, call, slot) && fault->kind == SIM_FAULT_FAIL) {
            nvmlReturn_t code = (nvmlReturn_t)fault->code;
            if (use_up(fault)) {
                return code == NVML_SUCCESS ? NVML_ERROR_UNKNOWN : code;
            }
        }
    }
    return NVML_SUCCESS;
}
