/* Processes on a GPU. */
#include "sim.h"

#include <string.h>

/* Writes a process to position `number` of a caller's array. */
typedef void (*put_t)(void *out, unsigned int number, const struct sim_process *process);

static int worked_since(const struct sim_process *process, uint64_t since) {
    return process->sampled_us > since && (process->sm_utilization | process->memory_utilization |
                                           process->encoder_utilization | process->decoder_utilization);
}

/* The processes of a GPU that stand in a list (`kind`), or, for kind 0, that worked after `since`.
 * At most `room` of them are put; answers how many there are. */
static unsigned int collect(struct sim_gpu *gpu, uint32_t kind, uint64_t since, unsigned int room, put_t put,
                            void *out) {
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
            if (found < room) {
                put(out, found, process);
            }
            found++;
        }
    } while (sim_torn(machine, begun, &tries));
    return found;
}

static void put_info(void *out, unsigned int number, const struct sim_process *process) {
    nvmlProcessInfo_t *info = (nvmlProcessInfo_t *)out + number;
    info->pid = process->pid;
    info->usedGpuMemory = process->memory_used;
    info->gpuInstanceId = 0xFFFFFFFFu;
    info->computeInstanceId = 0xFFFFFFFFu;
}

static nvmlReturn_t running(struct sim_gpu *gpu, uint32_t kind, unsigned int *count, nvmlProcessInfo_t *infos) {
    unsigned int room = infos == NULL ? 0 : *count;
    *count = collect(gpu, kind, 0, room, put_info, infos);
    return *count > room ? NVML_ERROR_INSUFFICIENT_SIZE : NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetComputeRunningProcesses_v3(nvmlDevice_t device, unsigned int *count, nvmlProcessInfo_t *infos) {
    SIM_NEED(count != NULL);
    SIM_GPU(nvmlDeviceGetComputeRunningProcesses);
    return running(gpu, SIM_PROCESS_COMPUTE, count, infos);
}

nvmlReturn_t nvmlDeviceGetMPSComputeRunningProcesses_v3(nvmlDevice_t device, unsigned int *count,
                                                        nvmlProcessInfo_t *infos) {
    SIM_NEED(count != NULL);
    SIM_GPU(nvmlDeviceGetMPSComputeRunningProcesses);
    SIM_OFFERED(gpu->cc_major >= 7);
    return running(gpu, SIM_PROCESS_MPS, count, infos);
}

nvmlReturn_t nvmlDeviceGetGraphicsRunningProcesses_v3(nvmlDevice_t device, unsigned int *count,
                                                      nvmlProcessInfo_t *infos) {
    SIM_NEED(count != NULL);
    SIM_GPU(nvmlDeviceGetGraphicsRunningProcesses);
    return running(gpu, SIM_PROCESS_GRAPHICS, count, infos);
}

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
    *count = collect(gpu, 0, since, room, put, out);
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
