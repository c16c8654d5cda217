/* Processes on a GPU. */
#include "sim.h"

#include <string.h>

/* Writes a process to position `number` of a caller's array. */
typedef void (*put_t)(void *out, unsigned int number, const struct sim_process *process);

static int worked_since(const struct sim_process *process, uint64_t since) {
    return process->sampled_us > since && (process->sm_utilization | process->memory_utilization |
                                           process->encoder_utilization | process->decoder_utilization);
}

struct put_cuda {
    put_t put;
    void *out;
    unsigned int room, found;
};

static void put_cuda(void *data, uint32_t pid, uint64_t bytes) {
    struct put_cuda *rest = data;
    if (rest->found < rest->room) {
        struct sim_process process = {.pid = pid, .kind = SIM_PROCESS_COMPUTE, .memory_used = bytes};
        rest->put(rest->out, rest->found, &process);
    }
    rest->found++;
}

struct put_work {
    put_t put;
    void *out;
    unsigned int room, found;
};

static void put_work(void *data, uint32_t pid, uint32_t percent, uint64_t sampled_us) {
    struct put_work *rest = data;
    if (rest->found < rest->room) {
        struct sim_process process = {.pid = pid, .sm_utilization = percent, .sampled_us = sampled_us};
        rest->put(rest->out, rest->found, &process);
    }
    rest->found++;
}

/* The processes of a GPU that stand in a list (`kind`), or, for kind 0, that worked after `since`.
 * Of an instance (`part`): those that run on it. At most `room` of them are put; answers how many there are. */
static unsigned int collect(struct sim_gpu *gpu, const struct sim_instance *part, uint32_t kind, uint64_t since,
                            unsigned int room, put_t put, void *out) {
    struct sim_machine *machine = sim_machine();
    uint32_t slot = (uint32_t)(gpu - machine->gpus);
    unsigned int found, tries = 0;
    uint32_t begun;
    do {
        begun = sim_begin(machine);
        found = 0;
        for (uint32_t number = 0; number < machine->process_count && number < SIM_PROCESS_SLOTS; number++) {
            const struct sim_process *process = &machine->processes[number];
            if (process->slot != slot || !(kind ? process->kind & kind : (uint32_t)worked_since(process, since))) {
                continue;
            }
            if (part != NULL && process->gpu_instance != part->gpu_instance) {
                continue;
            }
            if (found < room) {
                put(out, found, process);
            }
            found++;
        }
    } while (sim_torn(machine, begun, &tries));
    if (part == NULL && (kind & SIM_PROCESS_COMPUTE)) {
        struct put_cuda rest = {.put = put, .out = out, .room = room, .found = found};
        sim_cuda_each(sim_cuda_gpu(gpu), put_cuda, &rest);
        found = rest.found;
    }
    if (kind == 0) {
        struct put_work rest = {.put = put, .out = out, .room = room, .found = found};
        sim_cuda_work(sim_cuda_gpu(gpu), since, put_work, &rest);
        found = rest.found;
    }
    return found;
}

static void put_info(void *out, unsigned int number, const struct sim_process *process) {
    nvmlProcessInfo_t *info = (nvmlProcessInfo_t *)out + number;
    info->pid = process->pid;
    info->usedGpuMemory = process->memory_used;
    info->gpuInstanceId = 0xFFFFFFFFu;
    info->computeInstanceId = 0xFFFFFFFFu;
}

/* Each list has three forms, which differ in what they say of a process. */
static void put_info_v1(void *out, unsigned int number, const struct sim_process *process) {
    nvmlProcessInfo_v1_t *info = (nvmlProcessInfo_v1_t *)out + number;
    info->pid = process->pid;
    info->usedGpuMemory = process->memory_used;
}

static nvmlReturn_t running(struct sim_gpu *gpu, const struct sim_instance *part, uint32_t kind, unsigned int *count,
                            put_t put, void *infos) {
    unsigned int room = infos == NULL ? 0 : *count;
    *count = collect(gpu, part, kind, 0, room, put, infos);
    return *count > room ? NVML_ERROR_INSUFFICIENT_SIZE : NVML_SUCCESS;
}

/* nvmlProcessInfo_v2_t is laid out as the newest form. */
_Static_assert(sizeof(nvmlProcessInfo_v2_t) == sizeof(nvmlProcessInfo_t), "one form");

#define LIST(list, suffix, type, kind, put, offered)                                                            \
    nvmlReturn_t nvmlDeviceGet##list##suffix(nvmlDevice_t device, unsigned int *count, type *infos) {           \
        SIM_NEED(count != NULL);                                                                                \
        SIM_GPU(nvmlDeviceGet##list);                                                                           \
        SIM_OFFERED(offered);                                                                                   \
        SIM_PART();                                                                                             \
        return running(gpu, part, kind, count, put, infos);                                                     \
    }
#define LISTS(list, kind, offered)                                             \
    LIST(list, _v3, nvmlProcessInfo_t, kind, put_info, offered)                \
    LIST(list, _v2, nvmlProcessInfo_v2_t, kind, put_info, offered)             \
    LIST(list, , nvmlProcessInfo_v1_t, kind, put_info_v1, offered)

LISTS(ComputeRunningProcesses, SIM_PROCESS_COMPUTE, 1)
LISTS(MPSComputeRunningProcesses, SIM_PROCESS_MPS, gpu->cc_major >= 7)
LISTS(GraphicsRunningProcesses, SIM_PROCESS_GRAPHICS, 1)

static void put_sample(void *out, unsigned int number, const struct sim_process *process) {
    nvmlProcessUtilizationSample_t *sample = (nvmlProcessUtilizationSample_t *)out + number;
    sample->pid = process->pid;
    sample->timeStamp = process->sampled_us;
    sample->smUtil = process->sm_utilization;
    sample->memUtil = process->memory_utilization;
    sample->encUtil = process->encoder_utilization;
    sample->decUtil = process->decoder_utilization;
}

static void put_utilization(void *out, unsigned int number, const struct sim_process *process) {
    nvmlProcessUtilizationInfo_v1_t *info = (nvmlProcessUtilizationInfo_v1_t *)out + number;
    memset(info, 0, sizeof(*info));
    info->pid = process->pid;
    info->timeStamp = process->sampled_us;
    info->smUtil = process->sm_utilization;
    info->memUtil = process->memory_utilization;
    info->encUtil = process->encoder_utilization;
    info->decUtil = process->decoder_utilization;
}

/* Samples newer than `since`; `count` is the room before and the number of samples after. */
static nvmlReturn_t samples_since(struct sim_gpu *gpu, uint64_t since, unsigned int *count, put_t put, void *out) {
    unsigned int room = out == NULL ? 0 : *count;
    *count = collect(gpu, NULL, 0, since, room, put, out);
    if (*count == 0) {
        return NVML_ERROR_NOT_FOUND; /* nobody worked: not a fault */
    }
    return *count > room ? NVML_ERROR_INSUFFICIENT_SIZE : NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetProcessUtilization(nvmlDevice_t device, nvmlProcessUtilizationSample_t *samples,
                                             unsigned int *count, unsigned long long since) {
    SIM_NEED(count != NULL);
    SIM_GPU(nvmlDeviceGetProcessUtilization);
    SIM_OFFERED(!gpu->mig_mode);
    return samples_since(gpu, since, count, put_sample, samples);
}

nvmlReturn_t nvmlDeviceGetProcessesUtilizationInfo(nvmlDevice_t device, nvmlProcessesUtilizationInfo_t *info) {
    SIM_NEED(info != NULL);
    if (info->version != nvmlProcessesUtilizationInfo_v1) {
        return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
    }
    SIM_GPU(nvmlDeviceGetProcessUtilization);
    SIM_OFFERED(!gpu->mig_mode);
    return samples_since(gpu, info->lastSeenTimeStamp, &info->processSamplesCount, put_utilization,
                         info->procUtilArray);
}
