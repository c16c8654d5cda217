/* The driver's private tables, which no header names. NVIDIA's runtime asks for some before its first call.
 *
 * `test_private_tables_are_those_of_the_driver` holds the tables and their lengths to NVIDIA's own driver. Only a few
 * entries do anything; to call another one, or to ask for a table that is not here, ends the program with a message.
 * Not here, and not to be: the table by which the runtime has the driver prove that it is NVIDIA's. */
#include "double.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define UUID_BYTES 16u
#define WORDS 12u
#define ROOM 24u /* behind a table's end: runtimes that are newer than the tables look there for more */

struct table {
    const unsigned char id[UUID_BYTES];
    const char *name;
    int headed; /* the first word is the length in bytes */
    uint32_t words;
    void *const known[WORDS]; /* by their place; the others are traps */
};

/* --- traps: entries that nobody was seen to call ------------------------------------------------------ */
static void trapped(unsigned entry) {
    fprintf(stderr, "cuda double: entry %u of a private table was called, and nothing is known of it\n", entry);
    abort();
}

#define TRAP(entry)                 \
    static void trap_##entry(void) { \
        trapped(entry);             \
    }
TRAP(0) TRAP(1) TRAP(2) TRAP(3) TRAP(4) TRAP(5) TRAP(6) TRAP(7) TRAP(8) TRAP(9) TRAP(10) TRAP(11)
TRAP(12) TRAP(13) TRAP(14) TRAP(15) TRAP(16) TRAP(17) TRAP(18) TRAP(19) TRAP(20) TRAP(21) TRAP(22) TRAP(23)
static void (*const traps[ROOM])(void) = {trap_0,  trap_1,  trap_2,  trap_3,  trap_4,  trap_5,  trap_6,  trap_7,
                                          trap_8,  trap_9,  trap_10, trap_11, trap_12, trap_13, trap_14, trap_15,
                                          trap_16, trap_17, trap_18, trap_19, trap_20, trap_21, trap_22, trap_23};

/* --- the runtime's own interface ---------------------------------------------------------------------- */
/* It retains the primary context here, unseen by whoever only looks at the driver's names. */
static CUresult primary_context(CUcontext *context, CUdevice device) {
    return model_cuDevicePrimaryCtxRetain(context, device);
}

/* --- what a library keeps with a context -------------------------------------------------------------- */
struct kept {
    CUcontext context;
    void *key, *value;
    void (*gone)(CUcontext, void *, void *);
    struct kept *next;
};
static struct kept *all_kept;
static pthread_mutex_t kept_lock = PTHREAD_MUTEX_INITIALIZER;

static CUcontext or_current(CUcontext context) {
    struct context *found = NULL;
    return context != NULL || current(&found) != CUDA_SUCCESS ? context : (CUcontext)found;
}

static CUresult keep(CUcontext context, void *key, void *value, void (*gone)(CUcontext, void *, void *)) {
    struct kept *made = calloc(1, sizeof(*made));
    *made = (struct kept){.context = or_current(context), .key = key, .value = value, .gone = gone};
    pthread_mutex_lock(&kept_lock);
    made->next = all_kept;
    all_kept = made;
    pthread_mutex_unlock(&kept_lock);
    return CUDA_SUCCESS;
}

static CUresult forget(CUcontext context, void *key) {
    CUresult result = CUDA_ERROR_INVALID_HANDLE;
    context = or_current(context);
    pthread_mutex_lock(&kept_lock);
    for (struct kept **at = &all_kept; *at != NULL; at = &(*at)->next) {
        if ((*at)->context == context && (*at)->key == key) {
            struct kept *found = *at;
            *at = found->next;
            free(found);
            result = CUDA_SUCCESS;
            break;
        }
    }
    pthread_mutex_unlock(&kept_lock);
    return result;
}

static CUresult look_up(void **value, CUcontext context, void *key) {
    CUresult result = CUDA_ERROR_INVALID_HANDLE;
    context = or_current(context);
    pthread_mutex_lock(&kept_lock);
    for (struct kept *at = all_kept; at != NULL; at = at->next) {
        if (at->context == context && at->key == key) {
            *value = at->value;
            result = CUDA_SUCCESS;
            break;
        }
    }
    pthread_mutex_unlock(&kept_lock);
    return result;
}

/* --- hooks for tools: buffers of switches, all off ---------------------------------------------------- */
static void tool_switches(void **at, size_t *words) {
    static uint64_t switches[1024];
    *at = switches;
    *words = 1024;
}

static void more_tool_switches(void **at, size_t *bytes) {
    static unsigned char switches[14];
    *at = switches;
    *bytes = sizeof(switches);
}

static const struct table tables[] = {
    {{0x6b, 0xd5, 0xfb, 0x6c, 0x5b, 0xf4, 0xe7, 0x4a, 0x89, 0x87, 0xd9, 0x39, 0x12, 0xfd, 0x9d, 0xf9}, "runtime", 1, 12,
     {[2] = (void *)primary_context}},
    {{0xa0, 0x94, 0x79, 0x8c, 0x2e, 0x74, 0x2e, 0x74, 0x93, 0xf2, 0x08, 0x00, 0x20, 0x0c, 0x0a, 0x66}, "tools' hooks", 1, 7,
     {[2] = (void *)tool_switches, [6] = (void *)more_tool_switches}},
    {{0x42, 0xd8, 0x5a, 0x81, 0x23, 0xf6, 0xcb, 0x47, 0x82, 0x98, 0xf6, 0xe7, 0x8a, 0x3a, 0xec, 0xdc}, "tools' threads", 1, 3, {0}},
    {{0xc6, 0x93, 0x33, 0x6e, 0x11, 0x21, 0xdf, 0x11, 0xa8, 0xc3, 0x68, 0xf3, 0x55, 0xd8, 0x95, 0x93}, "kept", 0, 3,
     {[0] = (void *)keep, [1] = (void *)forget, [2] = (void *)look_up}},
};
/* Asked for by the runtime, and refused by the drivers 535 and 550. */
static const unsigned char refused[][UUID_BYTES] = {
    {0xf8, 0xcf, 0xf9, 0x51, 0x21, 0x46, 0x8b, 0x4e, 0xb9, 0xe2, 0xfb, 0x46, 0x9e, 0x7c, 0x0d, 0xd9},
};

CUresult model_cuGetExportTable(const void **ppExportTable, const CUuuid *pExportTableId) {
    static uintptr_t made[sizeof(tables) / sizeof(tables[0])][ROOM];
    NEED(ppExportTable != NULL && pExportTableId != NULL);
    for (size_t number = 0; number < sizeof(tables) / sizeof(tables[0]); number++) {
        const struct table *table = &tables[number];
        if (memcmp(pExportTableId->bytes, table->id, UUID_BYTES) == 0) {
            for (uint32_t word = 0; word < ROOM; word++) {
                void *known = word < table->words ? table->known[word] : NULL;
                made[number][word] = (uintptr_t)(known != NULL ? known : (void *)traps[word]);
            }
            if (table->headed) {
                made[number][0] = table->words * sizeof(uintptr_t);
            }
            *ppExportTable = made[number];
            return CUDA_SUCCESS;
        }
    }
    for (size_t number = 0; number < sizeof(refused) / sizeof(refused[0]); number++) {
        if (memcmp(pExportTableId->bytes, refused[number], UUID_BYTES) == 0) {
            return CUDA_ERROR_INVALID_VALUE; /* as they answer */
        }
    }
    fprintf(stderr, "cuda double: nothing is known of the private table ");
    for (size_t byte = 0; byte < UUID_BYTES; byte++) {
        fprintf(stderr, "%02x", (unsigned char)pExportTableId->bytes[byte]);
    }
    fprintf(stderr, "\n");
    abort();
}
