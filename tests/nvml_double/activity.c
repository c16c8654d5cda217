/* Activity of a GPU's parts between two samples (GPM), in percent as the state says it. */
#include <stdlib.h>

#include "sim.h"

struct nvmlGpmSample_st {
    const struct sim_gpu *gpu; /* NULL: nothing was sampled yet */
};

nvmlReturn_t nvmlGpmQueryDeviceSupport(nvmlDevice_t device, nvmlGpmSupport_t *support) {
    SIM_NEED(support != NULL && support->version == NVML_GPM_SUPPORT_VERSION);
    SIM_GPU(nvmlGpmQueryDeviceSupport);
    support->isSupportedDevice = gpu->gpm_supported;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlGpmSampleAlloc(nvmlGpmSample_t *sample) {
    SIM_NEED(sample != NULL);
    *sample = calloc(1, sizeof **sample);
    return *sample == NULL ? NVML_ERROR_MEMORY : NVML_SUCCESS;
}

nvmlReturn_t nvmlGpmSampleFree(nvmlGpmSample_t sample) {
    SIM_NEED(sample != NULL);
    free(sample);
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlGpmSampleGet(nvmlDevice_t device, nvmlGpmSample_t sample) {
    SIM_NEED(sample != NULL);
    SIM_GPU(nvmlGpmSampleGet);
    SIM_OFFERED(gpu->gpm_supported && !gpu->mig_mode);
    sample->gpu = gpu;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlGpmMetricsGet(nvmlGpmMetricsGet_t *get) {
    static const unsigned int order[SIM_ACTIVITIES] = {NVML_GPM_METRIC_GRAPHICS_UTIL, NVML_GPM_METRIC_SM_UTIL,
                                                       NVML_GPM_METRIC_ANY_TENSOR_UTIL, NVML_GPM_METRIC_DRAM_BW_UTIL};
    SIM_NEED(get != NULL && get->version == NVML_GPM_METRICS_GET_VERSION && get->numMetrics <= NVML_GPM_METRIC_MAX);
    SIM_NEED(get->sample1 != NULL && get->sample2 != NULL && get->sample2->gpu != NULL);
    for (unsigned int at = 0; at < get->numMetrics; at++) {
        get->metrics[at].nvmlReturn = NVML_ERROR_NOT_SUPPORTED;
        for (unsigned int part = 0; part < SIM_ACTIVITIES; part++) {
            if (get->metrics[at].metricId == order[part]) {
                get->metrics[at].nvmlReturn = NVML_SUCCESS;
                get->metrics[at].value = get->sample2->gpu->activity[part];
            }
        }
    }
    return NVML_SUCCESS;
}
