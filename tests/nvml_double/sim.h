/* A simulated libnvidia-ml.so.1: inner interface of its parts.
 *
 * The state of the machine lies in a file (environment GNA_SIM_STATE) that Python code writes; here it
 * is only read, but for the compute mode, instances and MIG mode, and the countdown of injected faults.
 */
#ifndef SIM_H
#define SIM_H

#define NVML_NO_UNVERSIONED_FUNC_DEFS
/* Everything is hidden by default (-fvisibility=hidden): what nvml.h declares is what we export. */
#pragma GCC visibility push(default)
#include <nvml.h>
#pragma GCC visibility pop

#include "cuda_layout.h"
#include "sim_layout.h"

struct nvmlDevice_st {
    uint32_t slot;
};

/* Map the state file. A later call maps it again where the environment names another file. */
nvmlReturn_t sim_map(void);
/* The mapping in use, or NULL. It is never unmapped: a hung call may still look at it. */
struct sim_machine *sim_machine(void);

int sim_ready(void); /* initialised */

/* What every call does first: initialised? any injected fault? */
nvmlReturn_t sim_gate(enum sim_call call);
/* The same for a call about a GPU, which must be there; `gpu` becomes its state. */
nvmlReturn_t sim_gate_device(enum sim_call call, nvmlDevice_t device, struct sim_gpu **gpu);
/* Let injected faults happen; slot -1 for a call about no GPU. */
nvmlReturn_t sim_strike(struct sim_machine *machine, enum sim_call call, int32_t slot);
/* Whether a GPU is plugged in and answers. */
int sim_present(struct sim_machine *machine, uint32_t slot);

/* The handle of a slot, and the way back, from an instance to its GPU (-1 for anything that is no handle of ours). */
nvmlDevice_t sim_handle(uint32_t slot);
int32_t sim_slot(nvmlDevice_t device);

/* --- mig.c: handles of instances ----------------------------------------------------------------------- */
/* The slot of an instance's GPU; -1: it is no handle of an instance. */
int32_t sim_part_slot(nvmlDevice_t device);
/* The instance of a handle, NULL for a whole GPU; an error when it is gone. */
nvmlReturn_t sim_part(nvmlDevice_t device, struct sim_gpu *gpu, struct sim_instance **part);
/* A process runs on an instance, by its number, or on any of the GPU (0). */
int sim_busy(struct sim_gpu *gpu, uint32_t gpu_instance);
int sim_part_named(const char *uuid, uint32_t slot, nvmlDevice_t *found);

/* Slots in NVML's order: those plugged in now or, where the machine says so, those at initialisation.
 * Answers the count. */
uint32_t sim_enumerate(struct sim_machine *machine, uint32_t order[SIM_MAX_GPUS]);
/* Readers of fields that belong together: begin, read, and again while `sim_torn`. */
uint32_t sim_begin(struct sim_machine *machine);
int sim_torn(struct sim_machine *machine, uint32_t begun, unsigned *tries);

/* Sleep while *word == expected. Returns 0 when the time is over; negative timeout_ms: no limit. */
int sim_futex_wait(uint32_t *word, uint32_t expected, int64_t timeout_ms);
int64_t sim_now_ms(void);

/* Copy a text field of `size` bytes into a caller's buffer. */
nvmlReturn_t sim_copy(const char *text, size_t size, char *buffer, unsigned int length);
/* PCI data of an address. */
void sim_pci(nvmlPciInfo_t *pci, uint32_t domain, uint32_t bus, uint32_t device, uint32_t id, uint32_t subsystem);

/* --- cuda.c: what programs have through the CUDA double, where the environment names its file ------------- */

/* The GPU's number there, or -1. */
int32_t sim_cuda_gpu(const struct sim_gpu *gpu);
/* Bytes of all living processes. */
uint64_t sim_cuda_used(int32_t number);
/* What is said of each living process that worked after `since_us`, and when its last period ended: microseconds by the wall. */
void sim_cuda_work(int32_t number, uint64_t since_us, void (*visit)(void *data, uint32_t pid, uint32_t percent, uint64_t sampled_us),
                   void *data);
/* Calls `visit` for each living process that has memory. */
void sim_cuda_each(int32_t number, void (*visit)(void *data, uint32_t pid, uint64_t bytes), void *data);
/* The shared file, or NULL. */
struct sim_cuda_machine *sim_cuda_machine(void);

#define SIM_NEED(condition)                      \
    do {                                         \
        if (!(condition)) {                      \
            return NVML_ERROR_INVALID_ARGUMENT;  \
        }                                        \
    } while (0)

#define SIM_GATE(name)                           \
    do {                                         \
        nvmlReturn_t gate_ = sim_gate(SIM_##name); \
        if (gate_ != NVML_SUCCESS) {             \
            return gate_;                        \
        }                                        \
    } while (0)

/* Declares `gpu`, the state of `device`, or returns from the function. */
#define SIM_GPU(name)                                              \
    struct sim_gpu *gpu = NULL;                                    \
    do {                                                           \
        nvmlReturn_t gate_ = sim_gate_device(SIM_##name, device, &gpu); \
        if (gate_ != NVML_SUCCESS) {                               \
            return gate_;                                          \
        }                                                          \
    } while (0)

/* Declares `part`, the instance that `device` stands for, NULL for a whole GPU. */
#define SIM_PART()                                               \
    struct sim_instance *part = NULL;                            \
    do {                                                         \
        nvmlReturn_t part_ = sim_part(device, gpu, &part);       \
        if (part_ != NVML_SUCCESS) {                             \
            return part_;                                        \
        }                                                        \
    } while (0)

#define SIM_OFFERED(condition)               \
    do {                                     \
        if (!(condition)) {                  \
            return NVML_ERROR_NOT_SUPPORTED; \
        }                                    \
    } while (0)

#endif
