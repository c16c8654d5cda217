/* Who gets a hook: a caller that asks for an entry point and is answered with a pointer that the driver itself gives for an
 * ABI that is known here. By the pointer, never by the name: one name stands for several ABIs, and which one an asker
 * gets is the driver's decision. */
#include "caps.h"

#include <dlfcn.h>
#include <string.h>

#include "table.inc" /* generated: gna_names, gna_rows (by base name), gna_hooks */

#define PLACES 4096u

void *gna_dlsym_address(void);
void *gna_dlvsym_address(void);
void *gna_nvml_route(const char *name, void *found);
bool gna_nvml_has(const char *name);

_Atomic(void *) gna_reals[GNA_IDS];
static struct gna_mutex lock;
static struct {
    _Atomic(void *) pointer;
    unsigned id;
} known[PLACES];
static _Atomic(void *) driver_handle;
static _Atomic unsigned char learned[GNA_IDS];

static CUresult absent(void) {
    return CUDA_ERROR_NOT_FOUND;
}

static void *driver(void) {
    void *handle = atomic_load_explicit(&driver_handle, memory_order_acquire);
    if (handle == NULL) {
        handle = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_NOLOAD);
        atomic_store_explicit(&driver_handle, handle, memory_order_release);
    }
    return handle;
}

static void *by_symbol(unsigned id) {
    void *handle = driver();
    return handle == NULL ? NULL : gna_real_dlsym(handle, gna_names + gna_rows[id].symbol);
}

void *gna_resolve(unsigned id) {
    void *found = by_symbol(id);
    if (found == NULL) {
        return (void *)absent; /* not kept: the driver may be loaded later */
    }
    atomic_store_explicit(&gna_reals[id], found, memory_order_release);
    return found;
}

bool gna_has(unsigned id) {
    return gna_real(id) != (void *)absent;
}

static size_t home(const void *pointer) {
    return (size_t)(((uintptr_t)pointer * UINT64_C(0x9e3779b97f4a7c15)) >> 40) & (PLACES - 1);
}

static int id_of(const void *pointer) {
    for (size_t place = home(pointer);; place = (place + 1) & (PLACES - 1)) {
        void *there = atomic_load_explicit(&known[place].pointer, memory_order_acquire);
        if (there == NULL) {
            return -1;
        }
        if (there == pointer) {
            return (int)known[place].id;
        }
    }
}

static bool is_hook(const void *pointer) {
    for (unsigned id = 0; id < GNA_IDS; id++) {
        if (gna_hooks[id] == pointer) {
            return true;
        }
    }
    return false;
}

static void remember(void *pointer, unsigned id) {
    static unsigned count;
    if (pointer == NULL || is_hook(pointer)) {
        return;
    }
    gna_enter(&lock);
    if (id_of(pointer) < 0 && count < PLACES / 2) {
        size_t place = home(pointer);
        while (atomic_load_explicit(&known[place].pointer, memory_order_relaxed) != NULL) {
            place = (place + 1) & (PLACES - 1);
        }
        count++;
        known[place].id = id;
        atomic_store_explicit(&known[place].pointer, pointer, memory_order_release);
    }
    gna_leave(&lock);
}

static void *by_resolver(unsigned id) {
    void *found = NULL;
    const char *base = gna_names + gna_rows[id].base;
    int version = (int)gna_rows[id].version;
    cuuint64_t flags = gna_rows[id].per_thread ? CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM : CU_GET_PROC_ADDRESS_LEGACY_STREAM;
    CUdriverProcAddressQueryResult status;
    CUresult result = CUDA_ERROR_NOT_FOUND;
    if (gna_has(GNA_ID_cuGetProcAddress_v2)) {
        result = REAL(cuGetProcAddress_v2)(base, &found, version, flags, &status);
    } else if (gna_has(GNA_ID_cuGetProcAddress)) {
        result = REAL(cuGetProcAddress)(base, &found, version, flags);
    }
    return result == CUDA_SUCCESS ? found : NULL;
}

/* The rows of a base name: [*first, *end). False where no hook exists for any of its ABIs. */
static bool rows_of(const char *base, unsigned *first, unsigned *end) {
    unsigned low = 0, high = GNA_IDS;
    while (low < high) {
        unsigned middle = (low + high) / 2;
        if (strcmp(gna_names + gna_rows[middle].base, base) < 0) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    for (*first = *end = low; *end < GNA_IDS && !strcmp(gna_names + gna_rows[*end].base, base);) {
        (*end)++;
    }
    for (unsigned id = *first; id < *end; id++) {
        if (gna_hooks[id] != NULL) {
            return true;
        }
    }
    return false;
}

/* Ask the driver for every ABI of a name that is known here, once. No lock is held meanwhile: the loader may be busy
 * with a constructor of another thread that asks here, and a driver may ask here itself, in this thread. */
static void learn(unsigned first, unsigned end) {
    static _Thread_local bool busy __attribute__((tls_model("initial-exec")));
    if (busy || driver() == NULL || atomic_load_explicit(&learned[first], memory_order_acquire)) {
        return;
    }
    busy = true;
    for (unsigned id = first; id < end; id++) {
        remember(by_symbol(id), id);
    }
    for (unsigned id = first; id < end; id++) {
        /* A driver that is older than an ABI may answer with the one before, which is known already; and one that
         * looks itself up in the process finds our hooks. */
        void *found = by_resolver(id);
        if (found != NULL && id_of(found) < 0 && !is_hook(found) && !gna_has(id)) {
            atomic_store_explicit(&gna_reals[id], found, memory_order_release); /* before its hook is given to anybody */
        }
        remember(found, id);
    }
    atomic_store_explicit(&learned[first], 1, memory_order_release);
    busy = false;
}

static bool is_strict(void) {
    struct gna_limit limit;
    if (!gna_files_open()) {
        return true;
    }
    for (unsigned record = 0; record < gna_records(); record++) {
        if (!gna_limit_of(record, &limit) || (limit.flags & GNA_FLAG_STRICT)) {
            return true;
        }
    }
    return false;
}

/* What the asker of `base` gets in place of `found`; NULL when it is newer than this library and must not pass. */
static void *route(const char *base, void *found) {
    unsigned first, end;
    int id = id_of(found);
    if (id < 0) {
        if (!rows_of(base, &first, &end)) {
            return found;
        }
        learn(first, end);
        id = id_of(found);
    }
    if (id >= 0) {
        return gna_hooks[id] == NULL ? found : gna_hooks[id];
    }
    if (!gna_rows[first].critical) {
        return found;
    }
    for (unsigned row = first; row < end; row++) {
        if (found == gna_hooks[row]) {
            return found;
        }
    }
    if (gna_attach() != NULL && gna_usage_sound()) {
        strncpy(gna_usage->header.newer_name, base, sizeof(gna_usage->header.newer_name) - 1);
        __atomic_fetch_add(&gna_usage->header.newer, 1, __ATOMIC_RELEASE);
    }
    return is_strict() ? NULL : found;
}

HOOK(cuGetProcAddress_v2)(const char *symbol, void **pfn, int cudaVersion, cuuint64_t flags, CUdriverProcAddressQueryResult *symbolStatus) {
    CUresult result = REAL(cuGetProcAddress_v2)(symbol, pfn, cudaVersion, flags, symbolStatus);
    if (result == CUDA_SUCCESS && symbol != NULL && pfn != NULL && *pfn != NULL && (*pfn = route(symbol, *pfn)) == NULL) {
        if (symbolStatus != NULL) {
            *symbolStatus = CU_GET_PROC_ADDRESS_VERSION_NOT_SUFFICIENT;
        }
        return CUDA_ERROR_NOT_FOUND;
    }
    return result;
}

HOOK(cuGetProcAddress)(const char *symbol, void **pfn, int cudaVersion, cuuint64_t flags) {
    CUresult result = REAL(cuGetProcAddress)(symbol, pfn, cudaVersion, flags);
    if (result == CUDA_SUCCESS && symbol != NULL && pfn != NULL && *pfn != NULL && (*pfn = route(symbol, *pfn)) == NULL) {
        return CUDA_ERROR_NOT_FOUND;
    }
    return result;
}

/* `cuMemcpyHtoD_v2_ptds` -> `cuMemcpyHtoD`. */
static const char *base_of(const char *name, char *base, size_t bytes) {
    size_t length = strlen(name);
    if (length >= bytes) {
        return NULL;
    }
    memcpy(base, name, length + 1);
    if (length > 5 && (!strcmp(base + length - 5, "_ptsz") || !strcmp(base + length - 5, "_ptds"))) {
        base[length -= 5] = 0;
    }
    if (length > 3 && base[length - 3] == '_' && base[length - 2] == 'v' && base[length - 1] >= '2' && base[length - 1] <= '9') {
        base[length - 3] = 0;
    }
    return base;
}

static bool concerns_us(const char *name) {
    char base[128];
    unsigned first, end;
    if (name == NULL) {
        return false;
    }
    if (name[0] == 'c' && name[1] == 'u') {
        return base_of(name, base, sizeof(base)) != NULL && rows_of(base, &first, &end);
    }
    return gna_nvml_has(name) || gna_same(name, "dlsym") || gna_same(name, "dlvsym");
}

void *dlsym(void *restrict handle, const char *restrict name);
void *dlvsym(void *restrict handle, const char *restrict name, const char *restrict version);

static void *replace(const char *name, void *found) {
    char base[128];
    unsigned first, end;
    if (found == NULL) {
        return NULL;
    }
    if (name[0] == 'd') {
        return !strcmp(name, "dlsym") ? (void *)dlsym : (void *)dlvsym;
    }
    if (name[0] == 'n') {
        return gna_nvml_route(name, found);
    }
    if (base_of(name, base, sizeof(base)) == NULL || !rows_of(base, &first, &end)) {
        return found;
    }
    if (driver() == NULL) {
        /* Ours was found where the asker has no driver at all. */
        for (unsigned row = first; row < end; row++) {
            if (found == gna_hooks[row]) {
                return NULL;
            }
        }
        return found;
    }
    learn(first, end);
    int id = id_of(found);
    return id >= 0 && gna_hooks[id] != NULL ? gna_hooks[id] : found;
}

static bool in_one_object(const void *one, const void *other) {
    Dl_info first, second;
    return dladdr(one, &first) && dladdr(other, &second) && first.dli_fbase == second.dli_fbase;
}

/* RTLD_NEXT means: behind the caller, which is us here. An asker that stands behind us may find itself so; it means the
 * driver, and so does one whose driver only its own libraries brought along. */
static void *next(const char *name, const void *asker) {
    void *found = gna_real_dlsym(RTLD_NEXT, name);
    bool is_missing = found == NULL || in_one_object(found, asker);
    if (is_missing && name[0] == 'c' && driver() != NULL) {
        return gna_real_dlsym(driver(), name);
    }
    return found;
}

/* What was asked on the way may have left a message for dlerror, which is to say nothing of a name that was found. */
static void *answered(void *found) {
    if (found != NULL) {
        dlerror();
    }
    return found;
}

__attribute__((visibility("default"))) void *dlsym(void *restrict handle, const char *restrict name) {
    void *(*real)(void *restrict, const char *restrict) = gna_dlsym_address();
    if (real == NULL) {
        return NULL;
    }
    if (!concerns_us(name)) {
        /* A jump: RTLD_NEXT and RTLD_DEFAULT go by the caller's address. */
        __attribute__((musttail)) return real(handle, name);
    }
    return answered(replace(name, handle == RTLD_NEXT ? next(name, __builtin_return_address(0)) : real(handle, name)));
}

__attribute__((visibility("default"))) void *dlvsym(void *restrict handle, const char *restrict name, const char *restrict version) {
    void *(*real)(void *restrict, const char *restrict, const char *restrict) = gna_dlvsym_address();
    if (real == NULL) {
        return NULL;
    }
    if (!concerns_us(name)) {
        __attribute__((musttail)) return real(handle, name, version);
    }
    return answered(replace(name, real(handle, name, version)));
}
