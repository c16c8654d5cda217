/* What every call passes when something is watched, or before cuInit: counts, injected faults, the record. */
#include "double.h"

#include <signal.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

static void pause_ms(uint32_t milliseconds) {
    struct timespec pause = {.tv_sec = milliseconds / 1000, .tv_nsec = milliseconds % 1000 * 1000000L};
    nanosleep(&pause, NULL);
}

/* Whether a fault's turn has come: `after` calls go by first, then `remaining` are struck. */
static int turn(struct sim_cuda_fault *fault) {
    int32_t left = __atomic_load_n(&fault->after, __ATOMIC_ACQUIRE);
    while (left > 0) {
        if (__atomic_compare_exchange_n(&fault->after, &left, left - 1, 0, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE)) {
            return 0;
        }
    }
    left = __atomic_load_n(&fault->remaining, __ATOMIC_ACQUIRE);
    while (left > 0) {
        if (__atomic_compare_exchange_n(&fault->remaining, &left, left - 1, 0, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE)) {
            return 1;
        }
    }
    return left < 0;
}

static int strike(struct sim_cuda_machine *machine, uint32_t symbol, CUresult *result) {
    for (uint32_t number = 0; number < SIM_CUDA_FAULTS; number++) {
        struct sim_cuda_fault *fault = &machine->faults[number];
        uint32_t action = __atomic_load_n(&fault->action, __ATOMIC_ACQUIRE);
        if (action == SIM_CUDA_FAULT_NONE || (fault->symbol >= 0 && fault->symbol != (int32_t)symbol) || !turn(fault)) {
            continue;
        }
        if (action == SIM_CUDA_FAULT_FAIL) {
            *result = (CUresult)fault->code;
            return 1;
        }
        if (action == SIM_CUDA_FAULT_CRASH) {
            raise(SIGKILL);
        }
        if (action == SIM_CUDA_FAULT_SLOW) {
            pause_ms(fault->milliseconds);
        }
        while (action == SIM_CUDA_FAULT_HANG && __atomic_load_n(&fault->action, __ATOMIC_ACQUIRE) == action) {
            pause_ms(2);
        }
    }
    return 0;
}

static uint64_t value_of(const struct argument *argument) {
    uint64_t value = 0;
    if (argument->size <= sizeof(value)) {
        memcpy(&value, argument->at, argument->size);
        return value;
    }
    value = UINT64_C(0xcbf29ce484222325); /* FNV-1a */
    for (size_t byte = 0; byte < argument->size; byte++) {
        value = (value ^ ((const unsigned char *)argument->at)[byte]) * UINT64_C(0x100000001b3);
    }
    return value;
}

static void record(struct sim_cuda_machine *machine, uint32_t symbol, const struct argument *arguments, uint32_t count) {
    uint32_t place = __atomic_fetch_add(&machine->record_head, 1, __ATOMIC_ACQ_REL) % SIM_CUDA_RECORDS;
    struct sim_cuda_record *record = &machine->records[place];
    record->symbol = symbol;
    record->count = count;
    record->pid = (uint32_t)getpid();
    for (uint32_t number = 0; number < count && number < SIM_CUDA_ARGUMENTS; number++) {
        record->arguments[number] = value_of(&arguments[number]);
    }
    __atomic_store_n(&record->ready, 1, __ATOMIC_RELEASE);
}

int gate(uint32_t symbol, uint32_t flags, const struct argument *arguments, uint32_t count, CUresult *result) {
    struct sim_cuda_machine *machine = state_map();
    *result = CUDA_ERROR_NOT_INITIALIZED;
    if (machine == NULL) {
        return !(flags & GATE_EARLY);
    }
    __atomic_fetch_add(&machine->calls[symbol], 1, __ATOMIC_RELAXED);
    uint32_t watch = __atomic_load_n(&machine->watch, __ATOMIC_ACQUIRE);
    if (watch & (SIM_CUDA_WATCH_RECORD | SIM_CUDA_WATCH_PROBE)) {
        record(machine, symbol, arguments, count);
    }
    if (watch & SIM_CUDA_WATCH_FAULTS && strike(machine, symbol, result)) {
        return 1;
    }
    if (watch & SIM_CUDA_WATCH_PROBE && !(flags & (GATE_EARLY | GATE_REPORT))) {
        *result = CUDA_SUCCESS;
        return 1;
    }
    return cuda_machine == NULL && !(flags & GATE_EARLY);
}
