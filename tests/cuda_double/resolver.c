/* How a program finds the entry points: by name, version and kind of stream, as the driver answers. */
#include "double.h"

#include <string.h>

/* Answers nonzero if the name is known at all. */
static int look_up(const char *name, uint32_t version, int per_thread, void **address) {
    int known = 0, best_stream = -1;
    *address = NULL;
    for (uint32_t number = 0; number < route_count; number++) {
        const struct route *route = &routes[number];
        if (strcmp(route->name, name) != 0) {
            continue;
        }
        known = 1;
        /* Where there is no form for a thread's stream, the one form there is; the highest version that fits. */
        if (route->version <= version && (!route->per_thread || per_thread) && (int)route->per_thread >= best_stream) {
            best_stream = (int)route->per_thread;
            *address = route->address;
        }
    }
    return known;
}

static CUresult resolve(const char *symbol, void **pfn, int version, uint64_t flags, int *known) {
    NEED(symbol != NULL && pfn != NULL && version > 0);
    NEED(flags == CU_GET_PROC_ADDRESS_DEFAULT || flags == CU_GET_PROC_ADDRESS_LEGACY_STREAM ||
         flags == CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM);
    *known = look_up(symbol, (uint32_t)version, flags == CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM, pfn);
    return CUDA_SUCCESS;
}

CUresult model_cuGetProcAddress(const char *symbol, void **pfn, int cudaVersion, cuuint64_t flags) {
    int known;
    TRY(resolve(symbol, pfn, cudaVersion, flags, &known));
    return *pfn == NULL ? CUDA_ERROR_NOT_FOUND : CUDA_SUCCESS;
}

#ifdef HAVE_cuGetProcAddress_v2
CUresult model_cuGetProcAddress_v2(const char *symbol, void **pfn, int cudaVersion, cuuint64_t flags,
                                   CUdriverProcAddressQueryResult *symbolStatus) {
    int known;
    TRY(resolve(symbol, pfn, cudaVersion, flags, &known));
    if (symbolStatus != NULL) {
        *symbolStatus = *pfn != NULL ? CU_GET_PROC_ADDRESS_SUCCESS
                        : known      ? CU_GET_PROC_ADDRESS_VERSION_NOT_SUFFICIENT
                                     : CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
    }
    return *pfn == NULL ? CUDA_ERROR_NOT_FOUND : CUDA_SUCCESS;
}
#endif
