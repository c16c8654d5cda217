/* Moving figures, and memory errors. */
#include "sim.h"

nvmlReturn_t nvmlDeviceGetUtilizationRates(nvmlDevice_t device, nvmlUtilization_t *rates) {
    SIM_NEED(rates != NULL);
    SIM_GPU(nvmlDeviceGetUtilizationRates);
    SIM_OFFERED(!gpu->mig_mode);
    rates->gpu = gpu->gpu_utilization;
    rates->memory = gpu->memory_utilization;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetPowerUsage(nvmlDevice_t device, unsigned int *milliwatts) {
    SIM_NEED(milliwatts != NULL);
    SIM_GPU(nvmlDeviceGetPowerUsage);
    *milliwatts = gpu->power_mw;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetEnforcedPowerLimit(nvmlDevice_t device, unsigned int *milliwatts) {
    SIM_NEED(milliwatts != NULL);
    SIM_GPU(nvmlDeviceGetEnforcedPowerLimit);
    *milliwatts = gpu->power_limit_mw;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetTotalEnergyConsumption(nvmlDevice_t device, unsigned long long *millijoules) {
    SIM_NEED(millijoules != NULL);
    SIM_GPU(nvmlDeviceGetTotalEnergyConsumption);
    *millijoules = gpu->energy_mj;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetTemperature(nvmlDevice_t device, nvmlTemperatureSensors_t sensor, unsigned int *celsius) {
    SIM_NEED(celsius != NULL && sensor == NVML_TEMPERATURE_GPU);
    SIM_GPU(nvmlDeviceGetTemperature);
    *celsius = gpu->temperature_c;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetTemperatureV(nvmlDevice_t device, nvmlTemperature_t *temperature) {
    SIM_NEED(temperature != NULL && temperature->sensorType == NVML_TEMPERATURE_GPU);
    if (temperature->version != nvmlTemperature_v1) {
        return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
    }
    SIM_GPU(nvmlDeviceGetTemperature);
    temperature->temperature = (int)gpu->temperature_c;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetClockInfo(nvmlDevice_t device, nvmlClockType_t type, unsigned int *mhz) {
    SIM_NEED(mhz != NULL && type < SIM_CLOCKS);
    SIM_GPU(nvmlDeviceGetClockInfo);
    *mhz = gpu->clocks_mhz[type];
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetMaxClockInfo(nvmlDevice_t device, nvmlClockType_t type, unsigned int *mhz) {
    SIM_NEED(mhz != NULL && type < SIM_CLOCKS);
    SIM_GPU(nvmlDeviceGetMaxClockInfo);
    *mhz = gpu->max_clocks_mhz[type];
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetCurrentClocksEventReasons(nvmlDevice_t device, unsigned long long *reasons) {
    SIM_NEED(reasons != NULL);
    SIM_GPU(nvmlDeviceGetCurrentClocksEventReasons);
    *reasons = gpu->event_reasons;
    return NVML_SUCCESS;
}

/* The name before driver 535. */
nvmlReturn_t nvmlDeviceGetCurrentClocksThrottleReasons(nvmlDevice_t device, unsigned long long *reasons) {
    return nvmlDeviceGetCurrentClocksEventReasons(device, reasons);
}

nvmlReturn_t nvmlDeviceGetPerformanceState(nvmlDevice_t device, nvmlPstates_t *state) {
    SIM_NEED(state != NULL);
    SIM_GPU(nvmlDeviceGetPerformanceState);
    *state = (nvmlPstates_t)gpu->performance_state;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetPcieThroughput(nvmlDevice_t device, nvmlPcieUtilCounter_t counter, unsigned int *kib_s) {
    SIM_NEED(kib_s != NULL && counter < NVML_PCIE_UTIL_COUNT);
    SIM_GPU(nvmlDeviceGetPcieThroughput);
    *kib_s = counter == NVML_PCIE_UTIL_TX_BYTES ? gpu->pcie_tx_kib_s : gpu->pcie_rx_kib_s;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetEccMode(nvmlDevice_t device, nvmlEnableState_t *current, nvmlEnableState_t *pending) {
    SIM_NEED(current != NULL && pending != NULL);
    SIM_GPU(nvmlDeviceGetEccMode);
    SIM_OFFERED(gpu->ecc_supported);
    *current = *pending = NVML_FEATURE_ENABLED;
    return NVML_SUCCESS;
}

static unsigned long long ecc_errors(struct sim_gpu *gpu, nvmlMemoryErrorType_t type, nvmlEccCounterType_t counter) {
    int corrected = type == NVML_MEMORY_ERROR_TYPE_CORRECTED;
    if (counter == NVML_VOLATILE_ECC) {
        return corrected ? gpu->ecc_volatile_corrected : gpu->ecc_volatile_uncorrected;
    }
    return corrected ? gpu->ecc_aggregate_corrected : gpu->ecc_aggregate_uncorrected;
}

nvmlReturn_t nvmlDeviceGetTotalEccErrors(nvmlDevice_t device, nvmlMemoryErrorType_t type, nvmlEccCounterType_t counter,
                                         unsigned long long *errors) {
    SIM_NEED(errors != NULL && type < NVML_MEMORY_ERROR_TYPE_COUNT && counter < NVML_ECC_COUNTER_TYPE_COUNT);
    SIM_GPU(nvmlDeviceGetTotalEccErrors);
    SIM_OFFERED(gpu->ecc_supported);
    *errors = ecc_errors(gpu, type, counter);
    return NVML_SUCCESS;
}

/* All simulated errors are errors of the device memory. */
nvmlReturn_t nvmlDeviceGetMemoryErrorCounter(nvmlDevice_t device, nvmlMemoryErrorType_t type,
                                             nvmlEccCounterType_t counter, nvmlMemoryLocation_t location,
                                             unsigned long long *errors) {
    SIM_NEED(errors != NULL && type < NVML_MEMORY_ERROR_TYPE_COUNT && counter < NVML_ECC_COUNTER_TYPE_COUNT);
    SIM_GPU(nvmlDeviceGetMemoryErrorCounter);
    SIM_OFFERED(gpu->ecc_supported);
    *errors = location == NVML_MEMORY_LOCATION_DEVICE_MEMORY ? ecc_errors(gpu, type, counter) : 0;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetRetiredPages(nvmlDevice_t device, nvmlPageRetirementCause_t cause, unsigned int *count,
                                       unsigned long long *addresses) {
    SIM_NEED(count != NULL && cause < NVML_PAGE_RETIREMENT_CAUSE_COUNT);
    SIM_GPU(nvmlDeviceGetRetiredPages);
    SIM_OFFERED(gpu->retirement_supported);
    int single = cause == NVML_PAGE_RETIREMENT_CAUSE_MULTIPLE_SINGLE_BIT_ECC_ERRORS;
    unsigned int room = *count;
    *count = single ? gpu->retired_single : gpu->retired_double;
    if (room < *count) {
        return NVML_ERROR_INSUFFICIENT_SIZE;
    }
    for (unsigned int page = 0; page < *count && addresses != NULL; page++) {
        addresses[page] = 0x10000ULL * (page + 1); /* the addresses mean nothing */
    }
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetRetiredPagesPendingStatus(nvmlDevice_t device, nvmlEnableState_t *pending) {
    SIM_NEED(pending != NULL);
    SIM_GPU(nvmlDeviceGetRetiredPagesPendingStatus);
    SIM_OFFERED(gpu->retirement_supported);
    *pending = gpu->retirement_pending ? NVML_FEATURE_ENABLED : NVML_FEATURE_DISABLED;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetRemappedRows(nvmlDevice_t device, unsigned int *corrected, unsigned int *uncorrected,
                                       unsigned int *pending, unsigned int *failed) {
    SIM_NEED(corrected != NULL && uncorrected != NULL && pending != NULL && failed != NULL);
    SIM_GPU(nvmlDeviceGetRemappedRows);
    SIM_OFFERED(gpu->remap_supported);
    *corrected = gpu->remap_correctable;
    *uncorrected = gpu->remap_uncorrectable;
    *pending = gpu->remap_pending;
    *failed = gpu->remap_failed;
    return NVML_SUCCESS;
}
