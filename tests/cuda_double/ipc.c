/* Memory of another process: legacy handles. Closing the exporter frees nothing while an importer has it open. */
#include "double.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

struct ticket { /* what the 64 bytes of a handle hold */
    uint64_t magic, size;
    uint32_t number, generation, pid, padding;
};
_Static_assert(sizeof(struct ticket) <= sizeof(CUipcMemHandle), "room in a handle");

CUresult model_cuIpcGetMemHandle(CUipcMemHandle *pHandle, CUdeviceptr dptr) {
    CUresult result = CUDA_ERROR_INVALID_VALUE;
    NEED(pHandle != NULL);
    objects_lock();
    struct memory *memory = memory_at(dptr);
    if (memory != NULL && memory->kind == SIM_CUDA_MEMORY_LINEAR && !memory->opened && memory->charged > 0) {
        if (memory->shared < 0) {
            memory->shared = share(memory->base.device, memory->kind, memory->charged);
        }
        if (memory->shared >= 0) {
            struct ticket ticket = {.magic = SIM_CUDA_MAGIC, .size = memory->size, .number = (uint32_t)memory->shared,
                                    .generation = cuda_machine->shared[memory->shared].generation, .pid = (uint32_t)getpid()};
            memset(pHandle, 0, sizeof(*pHandle));
            memcpy(pHandle, &ticket, sizeof(ticket));
            result = CUDA_SUCCESS;
        }
    }
    objects_unlock();
    return result;
}

struct search {
    int32_t shared;
    struct context *context;
    struct memory *found;
};

static void look(struct object *object, void *data) {
    struct search *search = data;
    struct memory *memory = (struct memory *)object;
    if (memory->opened && memory->shared == search->shared && memory->context == search->context) {
        search->found = memory;
    }
}

/* "If the memory handle has already been opened by the current context, the reference count on the handle is incremented
 * by 1 and the existing device pointer is returned": cuda.h. */
CUresult model_cuIpcOpenMemHandle_v2(CUdeviceptr *pdptr, CUipcMemHandle handle, unsigned int Flags) {
    struct ticket ticket;
    struct context *context;
    uint32_t device, kind;
    uint64_t charged;
    NEED(pdptr != NULL && Flags == CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS);
    memcpy(&ticket, &handle, sizeof(ticket));
    NEED(ticket.magic == SIM_CUDA_MAGIC);
    if (ticket.pid == (uint32_t)getpid()) {
        return CUDA_ERROR_INVALID_CONTEXT; /* not in the process that exported it */
    }
    TRY(current(&context));
    int32_t shared = share_join(ticket.number, ticket.generation, &device, &kind, &charged);
    NEED(shared >= 0);
    struct search search = {.shared = shared, .context = context};
    objects_lock();
    objects_each(MEMORY, look, &search);
    if (search.found != NULL) {
        share_drop((uint32_t)shared);
        search.found->opened++;
        *pdptr = search.found->base.key;
    }
    objects_unlock();
    if (search.found != NULL) {
        return CUDA_SUCCESS;
    }
    struct memory *memory = calloc(1, sizeof(*memory));
    *memory = (struct memory){.base.device = device, .kind = kind, .size = ticket.size, .charged = charged, .shared = shared, .opened = 1,
                              .context = context};
    objects_lock();
    *pdptr = address_take(ticket.size, ALIGNMENT);
    object_add(&memory->base, MEMORY, *pdptr);
    objects_unlock();
    return CUDA_SUCCESS;
}

CUresult model_cuIpcOpenMemHandle(CUdeviceptr *pdptr, CUipcMemHandle handle, unsigned int Flags) {
    return model_cuIpcOpenMemHandle_v2(pdptr, handle, Flags);
}

CUresult model_cuIpcCloseMemHandle(CUdeviceptr dptr) {
    objects_lock();
    struct memory *memory = (struct memory *)object_find(dptr, MEMORY);
    int opened = memory != NULL && memory->opened > 0;
    if (opened && --memory->opened == 0) {
        memory_free(memory);
    }
    objects_unlock();
    return opened ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
