/* The real dlsym and dlvsym, and the folder of this library.
 *
 * This library is itself what others find under these names, and which version of the symbol a process has differs by
 * its glibc, so that neither RTLD_NEXT nor a fixed version will do: the C library's own table of symbols is read.
 *
 * A program that is built with a sanitizer asks for dlsym before that is ready, and has functions of the C library replaced
 * by the sanitizer's: none of them is called on the way here. */
#include "caps.h"

#include <dlfcn.h>
#include <elf.h>
#include <link.h>
#include <string.h>

struct search {
    const char *name;
    void *found;
};

#pragma weak _r_debug

static const void *pointer_of(uint64_t base, uint64_t value) {
    /* glibc adds the base to these entries when it loads an object, other loaders do not. */
    return (const void *)(uintptr_t)(value < base ? base + value : value);
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

static bool begins(const char *text, const char *with) {
    while (*with != 0 && *text == *with) {
        text++, with++;
    }
    return *with == 0;
}

bool gna_same(const char *one, const char *other) {
    while (*one != 0 && *one == *other) {
        one++, other++;
    }
    return *one == *other;
}

static bool is_c_library(const char *path) {
    const char *name = path;
    for (; *path != 0; path++) {
        name = *path == '/' ? path + 1 : name;
    }
    return begins(name, "libc.so") || begins(name, "libdl.so") || begins(name, "libdl-") || begins(name, "libc-") || begins(name, "ld-musl-");
}

/* Whether the object is the C library, and has the name. */
static bool look_in(const char *path, uint64_t base, const ElfW(Dyn) *dynamic, struct search *search) {
    const ElfW(Sym) *symbols = NULL;
    const char *strings = NULL;
    const uint32_t *gnu = NULL, *sysv = NULL;
    if (path == NULL || !is_c_library(path)) {
        return false;
    }
    for (; dynamic != NULL && dynamic->d_tag != DT_NULL; dynamic++) {
        const void *at = pointer_of(base, dynamic->d_un.d_ptr);
        switch (dynamic->d_tag) {
        case DT_SYMTAB: symbols = at; break;
        case DT_STRTAB: strings = at; break;
        case DT_GNU_HASH: gnu = at; break;
        case DT_HASH: sysv = at; break;
        default: break;
        }
    }
    if (symbols == NULL || strings == NULL || (gnu == NULL && sysv == NULL)) {
        return false;
    }
    uint32_t count = gnu != NULL ? symbols_of(gnu) : sysv[1];
    for (uint32_t index = 0; index < count; index++) {
        unsigned type = symbols[index].st_info & 15;
        if (type == STT_FUNC && symbols[index].st_shndx != SHN_UNDEF && gna_same(strings + symbols[index].st_name, search->name)) {
            search->found = (void *)(uintptr_t)(base + symbols[index].st_value);
            return true;
        }
    }
    return false;
}

static int look(struct dl_phdr_info *object, size_t size, void *data) {
    (void)size;
    for (unsigned index = 0; index < object->dlpi_phnum; index++) {
        if (object->dlpi_phdr[index].p_type == PT_DYNAMIC) {
            const void *dynamic = (const void *)(uintptr_t)(object->dlpi_addr + object->dlpi_phdr[index].p_vaddr);
            return look_in(object->dlpi_name, object->dlpi_addr, dynamic, data);
        }
    }
    return 0;
}

/* Behind what the program began with others may be loaded and unloaded meanwhile, but not before it. */
static void search_loaded(struct search *search) {
    const struct link_map *object = &_r_debug == NULL ? NULL : _r_debug.r_map;
    while (object != NULL && !look_in(object->l_name, object->l_addr, object->l_ld, search)) {
        object = object->l_next;
    }
    if (search->found == NULL) {
        dl_iterate_phdr(look, search); /* a loader without that list */
    }
}

static void *find(_Atomic(void *) *kept, const char *name) {
    void *found = atomic_load_explicit(kept, memory_order_acquire);
    if (found == NULL) {
        struct search search = {.name = name};
        search_loaded(&search);
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
