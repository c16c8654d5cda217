/* NVLink, and the field values that have no function of their own. */
#include "sim.h"

#include <time.h>

/* Declares `wire`, the state of link number `link`, or returns as NVML does for links that are not there. */
#define SIM_LINK(name)                                                                    \
    SIM_GPU(name);                                                                        \
    if (link >= gpu->link_count) {                                                        \
        return gpu->link_count == 0 ? NVML_ERROR_NOT_SUPPORTED : NVML_ERROR_INVALID_ARGUMENT; \
    }                                                                                     \
    struct sim_link *wire = &gpu->links[link]

nvmlReturn_t nvmlDeviceGetNvLinkState(nvmlDevice_t device, unsigned int link, nvmlEnableState_t *active) {
    SIM_NEED(active != NULL);
    SIM_LINK(nvmlDeviceGetNvLinkState);
    *active = wire->active ? NVML_FEATURE_ENABLED : NVML_FEATURE_DISABLED;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetNvLinkVersion(nvmlDevice_t device, unsigned int link, unsigned int *version) {
    SIM_NEED(version != NULL);
    SIM_LINK(nvmlDeviceGetNvLinkVersion);
    *version = wire->version;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetNvLinkCapability(nvmlDevice_t device, unsigned int link, nvmlNvLinkCapability_t capability,
                                           unsigned int *result) {
    SIM_NEED(result != NULL && capability < NVML_NVLINK_CAP_COUNT);
    SIM_LINK(nvmlDeviceGetNvLinkCapability);
    *result = wire->active && capability != NVML_NVLINK_CAP_SLI_BRIDGE;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetNvLinkRemoteDeviceType(nvmlDevice_t device, unsigned int link,
                                                 nvmlIntNvLinkDeviceType_t *type) {
    SIM_NEED(type != NULL);
    SIM_LINK(nvmlDeviceGetNvLinkRemoteDeviceType);
    *type = (nvmlIntNvLinkDeviceType_t)wire->peer_type;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetNvLinkRemotePciInfo_v2(nvmlDevice_t device, unsigned int link, nvmlPciInfo_t *pci) {
    SIM_NEED(pci != NULL);
    SIM_LINK(nvmlDeviceGetNvLinkRemotePciInfo);
    sim_pci(pci, wire->domain, wire->bus, wire->device, wire->pci_device_id, 0);
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetNvLinkErrorCounter(nvmlDevice_t device, unsigned int link, nvmlNvLinkErrorCounter_t counter,
                                             unsigned long long *value) {
    SIM_NEED(value != NULL);
    SIM_LINK(nvmlDeviceGetNvLinkErrorCounter);
    switch (counter) {
    case NVML_NVLINK_ERROR_DL_REPLAY:
        *value = wire->replay_errors;
        return NVML_SUCCESS;
    case NVML_NVLINK_ERROR_DL_RECOVERY:
        *value = wire->recovery_errors;
        return NVML_SUCCESS;
    case NVML_NVLINK_ERROR_DL_CRC_FLIT:
        *value = wire->crc_flit_errors;
        return NVML_SUCCESS;
    case NVML_NVLINK_ERROR_DL_CRC_DATA:
        *value = wire->crc_data_errors;
        return NVML_SUCCESS;
    default:
        return NVML_ERROR_NOT_SUPPORTED;
    }
}

/* Bytes over one link (`scope`), or over all of them. */
static nvmlReturn_t throughput(struct sim_gpu *gpu, unsigned int scope, int transmit, nvmlFieldValue_t *field) {
    uint64_t sum = 0;
    SIM_OFFERED(gpu->link_count > 0);
    SIM_NEED(scope < gpu->link_count || scope == 0xFFFFFFFFu);
    for (uint32_t link = 0; link < gpu->link_count; link++) {
        if (scope == link || scope == 0xFFFFFFFFu) {
            sum += transmit ? gpu->links[link].tx_kib : gpu->links[link].rx_kib;
        }
    }
    field->valueType = NVML_VALUE_TYPE_UNSIGNED_LONG_LONG;
    field->value.ullVal = sum;
    return NVML_SUCCESS;
}

/* Errors of one kind over all links of a GPU. */
static nvmlReturn_t link_errors(struct sim_gpu *gpu, nvmlFieldValue_t *field) {
    uint64_t sum = 0;
    SIM_OFFERED(gpu->link_count > 0);
    for (uint32_t link = 0; link < gpu->link_count; link++) {
        switch (field->fieldId) {
        case NVML_FI_DEV_NVLINK_CRC_FLIT_ERROR_COUNT_TOTAL:
            sum += gpu->links[link].crc_flit_errors;
            break;
        case NVML_FI_DEV_NVLINK_CRC_DATA_ERROR_COUNT_TOTAL:
            sum += gpu->links[link].crc_data_errors;
            break;
        case NVML_FI_DEV_NVLINK_REPLAY_ERROR_COUNT_TOTAL:
            sum += gpu->links[link].replay_errors;
            break;
        default:
            sum += gpu->links[link].recovery_errors;
        }
    }
    field->valueType = NVML_VALUE_TYPE_UNSIGNED_LONG_LONG;
    field->value.ullVal = sum;
    return NVML_SUCCESS;
}

static nvmlReturn_t field_value(struct sim_gpu *gpu, nvmlFieldValue_t *field) {
    switch (field->fieldId) {
    case NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX:
        return throughput(gpu, field->scopeId, 1, field);
    case NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX:
        return throughput(gpu, field->scopeId, 0, field);
    case NVML_FI_DEV_NVLINK_CRC_FLIT_ERROR_COUNT_TOTAL:
    case NVML_FI_DEV_NVLINK_CRC_DATA_ERROR_COUNT_TOTAL:
    case NVML_FI_DEV_NVLINK_REPLAY_ERROR_COUNT_TOTAL:
    case NVML_FI_DEV_NVLINK_RECOVERY_ERROR_COUNT_TOTAL:
        return link_errors(gpu, field);
    case NVML_FI_DEV_NVLINK_LINK_COUNT:
        field->valueType = NVML_VALUE_TYPE_UNSIGNED_INT;
        field->value.uiVal = gpu->link_count;
        return NVML_SUCCESS;
    case NVML_FI_DEV_POWER_INSTANT:
    case NVML_FI_DEV_POWER_AVERAGE:
        field->valueType = NVML_VALUE_TYPE_UNSIGNED_INT;
        field->value.uiVal = gpu->power_mw;
        return NVML_SUCCESS;
    case NVML_FI_DEV_IS_RESETLESS_MIG_SUPPORTED:
        field->valueType = NVML_VALUE_TYPE_UNSIGNED_INT;
        field->value.uiVal = !gpu->mig_needs_reset;
        return gpu->mig_capable ? NVML_SUCCESS : NVML_ERROR_NOT_SUPPORTED;
    case NVML_FI_DEV_GET_GPU_RECOVERY_ACTION:
        SIM_OFFERED(gpu->recovery_action != SIM_NO_RECOVERY_ACTION);
        field->valueType = NVML_VALUE_TYPE_UNSIGNED_INT;
        field->value.uiVal = gpu->recovery_action;
        return NVML_SUCCESS;
    case NVML_FI_DEV_TOTAL_ENERGY_CONSUMPTION:
        field->valueType = NVML_VALUE_TYPE_UNSIGNED_LONG_LONG;
        field->value.ullVal = gpu->energy_mj;
        return NVML_SUCCESS;
    default:
        return NVML_ERROR_NOT_SUPPORTED;
    }
}

nvmlReturn_t nvmlDeviceGetFieldValues(nvmlDevice_t device, int count, nvmlFieldValue_t *values) {
    struct timespec now;
    SIM_NEED(values != NULL && count > 0);
    SIM_GPU(nvmlDeviceGetFieldValues);
    clock_gettime(CLOCK_REALTIME, &now);
    for (int number = 0; number < count; number++) {
        values[number].timestamp = (long long)now.tv_sec * 1000000 + now.tv_nsec / 1000;
        values[number].latencyUsec = 0;
        values[number].nvmlReturn = field_value(gpu, &values[number]);
    }
    return NVML_SUCCESS;
}
