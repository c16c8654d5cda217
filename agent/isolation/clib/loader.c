/* The real dlsym and dlvsym, and the folder of this library.
 *
 * This library is itself what others find under these names, and which version of the symbol a process has differs by
 * its glibc, so that neither RTLD_NEXT nor a fixed version will do: the C library's own table of symbols is read. */
#include "caps.h"

#include <dlfcn.h>
#include <elf.h>
#include <link.h>
#include <string.h>

struct search {
    const char *name;
    void *found;
};

static const void *pointer_of(const struct dl_phdr_info *object, uint64_t value) {
    /* glibc adds the base to these entries when it loads an object, other loaders do not. */
    return (const void *)(uintptr_t)(value < object->dlpi_addr ? object->dlpi_addr + value : value);
}

static uint32_t symbols_of(const uint32_t *gnu) {
    uint32_t buckets = gnu[0], first = gnu[1], words = gnu[2], last = 0;
    const uint32_t *bucket = gnu + 4 + 2 * words, *chain = bucket + buckets;
    for (uint32_t index = 0; index < buckets; index++) {
        last = bucket[index] > last ? bucket[index] : last;
    }
    while (last >= first && !(chain[last - first] & 1)) {
        last++;
    }
    return last + 1;
}

static bool is_c_library(const char *path) {
    const char *slash = strrchr(path, '/'), *name = slash == NULL ? path : slash + 1;
    return !strncmp(name, "libc.so", 7) || !strncmp(name, "libdl.so", 8) || !strncmp(name, "libdl-", 6) ||
           !strncmp(name, "libc-", 5) || !strncmp(name, "ld-musl-", 8);
}

static int look(struct dl_phdr_info *object, size_t size, void *data) {
    struct search *search = data;
    const ElfW(Dyn) *dynamic = NULL;
    const ElfW(Sym) *symbols = NULL;
    const char *strings = NULL;
    const uint32_t *gnu = NULL, *sysv = NULL;
    (void)size;
    if (object->dlpi_name == NULL || !is_c_library(object->dlpi_name)) {
        return 0;
    }
    for (unsigned index = 0; index < object->dlpi_phnum; index++) {
        if (object->dlpi_phdr[index].p_type == PT_DYNAMIC) {
            dynamic = (const ElfW(Dyn) *)(uintptr_t)(object->dlpi_addr + object->dlpi_phdr[index].p_vaddr);
        }
    }
    for (; dynamic != NULL && dynamic->d_tag != DT_NULL; dynamic++) {
        const void *at = pointer_of(object, dynamic->d_un.d_ptr);
        switch (dynamic->d_tag) {
        case DT_SYMTAB: symbols = at; break;
        case DT_STRTAB: strings = at; break;
        case DT_GNU_HASH: gnu = at; break;
        case DT_HASH: sysv = at; break;
        default: break;
        }
    }
    if (symbols == NULL || strings == NULL || (gnu == NULL && sysv == NULL)) {
        return 0;
    }
    uint32_t count = gnu != NULL ? symbols_of(gnu) : sysv[1];
    for (uint32_t index = 0; index < count; index++) {
        unsigned type = symbols[index].st_info & 15;
        if (type == STT_FUNC && symbols[index].st_shndx != SHN_UNDEF && !strcmp(strings + symbols[index].st_name, search->name)) {
            search->found = (void *)(uintptr_t)(object->dlpi_addr + symbols[index].st_value);
            return 1;
        }
    }
    return 0;
}

static void *find(_Atomic(void *) *kept, const char *name) {
    void *found = atomic_load_explicit(kept, memory_order_acquire);
    if (found == NULL) {
        struct search search = {.name = name};
        dl_iterate_phdr(look, &search);
        found = search.found;
        atomic_store_explicit(kept, found, memory_order_release);
    }
    return found;
}

static _Atomic(void *) kept_dlsym, kept_dlvsym;

void *gna_dlsym_address(void);
void *gna_dlvsym_address(void);

void *gna_dlsym_address(void) {
    return find(&kept_dlsym, "dlsym");
}

void *gna_dlvsym_address(void) {
    return find(&kept_dlvsym, "dlvsym");
}

void *gna_real_dlsym(void *handle, const char *name) {
    void *(*real)(void *, const char *) = gna_dlsym_address();
    return real == NULL ? NULL : real(handle, name);
}

void *gna_real_dlvsym(void *handle, const char *name, const char *version) {
    void *(*real)(void *, const char *, const char *) = gna_dlvsym_address();
    return real == NULL ? NULL : real(handle, name, version);
}

void *gna_own_folder(char *path, size_t bytes) {
    Dl_info info;
    /* As the loader was given it: the preload file has a whole path. */
    if (!dladdr((void *)gna_own_folder, &info) || info.dli_fname == NULL || info.dli_fname[0] != '/') {
        return NULL;
    }
    const char *slash = strrchr(info.dli_fname, '/');
    size_t length = (size_t)(slash - info.dli_fname) + 1;
    if (length >= bytes) {
        return NULL;
    }
    memcpy(path, info.dli_fname, length);
    path[length] = 0;
    return path + length;
}
