/* Arrays and mipmapped arrays. */
#include "double.h"

#include <stdlib.h>

struct array {
    struct object base;
    struct memory memory;
    CUDA_ARRAY3D_DESCRIPTOR shape;
    unsigned int levels;
    int mipmapped;
};

/* Bits of one element of a format and a count of channels; 0 for what this double does not know. */
static uint64_t element_bits(CUarray_format format, uint64_t channels) {
    switch ((int)format) {
    case CU_AD_FORMAT_UNSIGNED_INT8:
    case CU_AD_FORMAT_SIGNED_INT8:
        return 8 * channels;
    case CU_AD_FORMAT_UNSIGNED_INT16:
    case CU_AD_FORMAT_SIGNED_INT16:
    case CU_AD_FORMAT_HALF:
        return 16 * channels;
    case CU_AD_FORMAT_UNSIGNED_INT32:
    case CU_AD_FORMAT_SIGNED_INT32:
    case CU_AD_FORMAT_FLOAT:
        return 32 * channels;
    case CU_AD_FORMAT_NV12:
        return 12;
    case CU_AD_FORMAT_UNORM_INT8X1:
    case CU_AD_FORMAT_SNORM_INT8X1:
        return 8;
    case CU_AD_FORMAT_UNORM_INT8X2:
    case CU_AD_FORMAT_SNORM_INT8X2:
    case CU_AD_FORMAT_UNORM_INT16X1:
    case CU_AD_FORMAT_SNORM_INT16X1:
        return 16;
    case CU_AD_FORMAT_UNORM_INT8X4:
    case CU_AD_FORMAT_SNORM_INT8X4:
    case CU_AD_FORMAT_UNORM_INT16X2:
    case CU_AD_FORMAT_SNORM_INT16X2:
        return 32;
    case CU_AD_FORMAT_UNORM_INT16X4:
    case CU_AD_FORMAT_SNORM_INT16X4:
        return 64;
    case CU_AD_FORMAT_BC1_UNORM:
    case CU_AD_FORMAT_BC1_UNORM_SRGB:
    case CU_AD_FORMAT_BC4_UNORM:
    case CU_AD_FORMAT_BC4_SNORM:
        return 4;
    case CU_AD_FORMAT_BC2_UNORM:
    case CU_AD_FORMAT_BC2_UNORM_SRGB:
    case CU_AD_FORMAT_BC3_UNORM:
    case CU_AD_FORMAT_BC3_UNORM_SRGB:
    case CU_AD_FORMAT_BC5_UNORM:
    case CU_AD_FORMAT_BC5_SNORM:
    case CU_AD_FORMAT_BC6H_UF16:
    case CU_AD_FORMAT_BC6H_SF16:
    case CU_AD_FORMAT_BC7_UNORM:
    case CU_AD_FORMAT_BC7_UNORM_SRGB:
        return 8;
    default:
        return 0;
    }
}

static uint64_t at_least_one(uint64_t number) {
    return number > 0 ? number : 1;
}

/* Bytes of all levels: each halves every side. */
static uint64_t bytes_of(const CUDA_ARRAY3D_DESCRIPTOR *shape, unsigned int levels) {
    uint64_t bits = element_bits(shape->Format, shape->NumChannels), sum = 0;
    int layered = (shape->Flags & CUDA_ARRAY3D_LAYERED) != 0;
    for (unsigned int level = 0; level < levels; level++) {
        uint64_t width = at_least_one(shape->Width >> level), height = at_least_one(shape->Height >> level);
        uint64_t depth = at_least_one(layered ? shape->Depth : shape->Depth >> level);
        sum += width * height * depth * bits / 8;
    }
    return sum;
}

static CUresult create(const CUDA_ARRAY3D_DESCRIPTOR *shape, unsigned int levels, int mipmapped, struct array **made) {
    struct context *context;
    NEED(shape->Width > 0 && levels > 0 && levels < 32);
    NEED(element_bits(shape->Format, shape->NumChannels) > 0);
    NEED(shape->NumChannels == 1 || shape->NumChannels == 2 || shape->NumChannels == 3 || shape->NumChannels == 4);
    TRY(current(&context));
    struct array *array = calloc(1, sizeof(*array));
    array->shape = *shape;
    array->levels = levels;
    array->mipmapped = mipmapped;
    array->base.device = context->base.device;
    array->memory = (struct memory){.base.device = context->base.device, .kind = SIM_CUDA_MEMORY_ARRAY, .shared = -1};
    /* Sparse and deferred arrays have no memory until some is mapped. */
    if (!(shape->Flags & (CUDA_ARRAY3D_SPARSE | CUDA_ARRAY3D_DEFERRED_MAPPING))) {
        array->memory.size = bytes_of(shape, levels);
    }
    objects_lock();
    CUresult result = array->memory.size > 0 ? memory_charge(&array->memory) : CUDA_SUCCESS;
    if (result == CUDA_SUCCESS) {
        object_add(&array->base, ARRAY, (uint64_t)(uintptr_t)array);
        *made = array;
    } else {
        free(array);
    }
    objects_unlock();
    return result;
}

static CUresult destroy(const void *handle, int mipmapped) {
    CUresult result = CUDA_ERROR_INVALID_HANDLE;
    objects_lock();
    struct array *array = (struct array *)object_find_handle(handle, ARRAY);
    if (array != NULL && array->mipmapped == mipmapped) {
        object_remove(&array->base);
        memory_discharge(&array->memory);
        free(array);
        result = CUDA_SUCCESS;
    }
    objects_unlock();
    return result;
}

CUresult model_cuArray3DCreate_v2(CUarray *pHandle, const CUDA_ARRAY3D_DESCRIPTOR *pAllocateArray) {
    struct array *array;
    NEED(pHandle != NULL && pAllocateArray != NULL);
    TRY(create(pAllocateArray, 1, 0, &array));
    *pHandle = (CUarray)array;
    return CUDA_SUCCESS;
}

CUresult model_cuArray3DCreate(CUarray *pHandle, const CUDA_ARRAY3D_DESCRIPTOR_v1 *pAllocateArray) {
    NEED(pAllocateArray != NULL);
    CUDA_ARRAY3D_DESCRIPTOR shape = {.Width = pAllocateArray->Width, .Height = pAllocateArray->Height,
                                     .Depth = pAllocateArray->Depth, .Format = pAllocateArray->Format,
                                     .NumChannels = pAllocateArray->NumChannels, .Flags = pAllocateArray->Flags};
    return model_cuArray3DCreate_v2(pHandle, &shape);
}

CUresult model_cuArrayCreate_v2(CUarray *pHandle, const CUDA_ARRAY_DESCRIPTOR *pAllocateArray) {
    NEED(pAllocateArray != NULL);
    CUDA_ARRAY3D_DESCRIPTOR shape = {.Width = pAllocateArray->Width, .Height = pAllocateArray->Height,
                                     .Format = pAllocateArray->Format, .NumChannels = pAllocateArray->NumChannels};
    return model_cuArray3DCreate_v2(pHandle, &shape);
}

CUresult model_cuArrayCreate(CUarray *pHandle, const CUDA_ARRAY_DESCRIPTOR_v1 *pAllocateArray) {
    NEED(pAllocateArray != NULL);
    CUDA_ARRAY3D_DESCRIPTOR shape = {.Width = pAllocateArray->Width, .Height = pAllocateArray->Height,
                                     .Format = pAllocateArray->Format, .NumChannels = pAllocateArray->NumChannels};
    return model_cuArray3DCreate_v2(pHandle, &shape);
}

CUresult model_cuArray3DGetDescriptor_v2(CUDA_ARRAY3D_DESCRIPTOR *pArrayDescriptor, CUarray hArray) {
    NEED(pArrayDescriptor != NULL);
    objects_lock();
    struct array *array = (struct array *)object_find_handle(hArray, ARRAY);
    if (array != NULL) {
        *pArrayDescriptor = array->shape;
    }
    objects_unlock();
    return array == NULL ? CUDA_ERROR_INVALID_HANDLE : CUDA_SUCCESS;
}

CUresult model_cuArrayDestroy(CUarray hArray) {
    return destroy(hArray, 0);
}

CUresult model_cuMipmappedArrayCreate(CUmipmappedArray *pHandle, const CUDA_ARRAY3D_DESCRIPTOR *pMipmappedArrayDesc,
                                      unsigned int numMipmapLevels) {
    struct array *array;
    NEED(pHandle != NULL && pMipmappedArrayDesc != NULL);
    TRY(create(pMipmappedArrayDesc, numMipmapLevels, 1, &array));
    *pHandle = (CUmipmappedArray)array;
    return CUDA_SUCCESS;
}

CUresult model_cuMipmappedArrayDestroy(CUmipmappedArray hMipmappedArray) {
    return destroy(hMipmappedArray, 1);
}

/* Asked for before memory is mapped to a sparse or deferred array. */
static CUresult requirements(CUDA_ARRAY_MEMORY_REQUIREMENTS *answer, const void *handle, int mipmapped) {
    CUresult result = CUDA_ERROR_INVALID_HANDLE;
    NEED(answer != NULL);
    objects_lock();
    struct array *array = (struct array *)object_find_handle(handle, ARRAY);
    if (array != NULL && array->mipmapped == mipmapped) {
        *answer = (CUDA_ARRAY_MEMORY_REQUIREMENTS){.size = round_up(bytes_of(&array->shape, array->levels), granule(array->base.device)),
                                                   .alignment = granule(array->base.device)};
        result = array->shape.Flags & CUDA_ARRAY3D_DEFERRED_MAPPING ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
    }
    objects_unlock();
    return result;
}

CUresult model_cuArrayGetMemoryRequirements(CUDA_ARRAY_MEMORY_REQUIREMENTS *memoryRequirements, CUarray array,
                                            CUdevice device) {
    uint32_t index;
    TRY(device_index(device, &index));
    return requirements(memoryRequirements, array, 0);
}

CUresult model_cuMipmappedArrayGetMemoryRequirements(CUDA_ARRAY_MEMORY_REQUIREMENTS *memoryRequirements,
                                                     CUmipmappedArray mipmap, CUdevice device) {
    uint32_t index;
    TRY(device_index(device, &index));
    return requirements(memoryRequirements, mipmap, 1);
}
