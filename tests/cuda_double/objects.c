/* Handles and addresses of this process, by their value: anything else is refused, not followed. */
#include "double.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>

#define BUCKETS 8192u
static struct object *buckets[BUCKETS];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static uint64_t next_address = UINT64_C(0x20000000000);
static uint64_t next_narrow = ALIGNMENT;

void objects_lock(void) {
    pthread_mutex_lock(&lock);
}

void objects_unlock(void) {
    pthread_mutex_unlock(&lock);
}

static struct object **bucket_of(uint64_t key) {
    return &buckets[(key * UINT64_C(0x9E3779B97F4A7C15)) >> 51 & (BUCKETS - 1)];
}

void object_add(struct object *object, enum object_kind kind, uint64_t key) {
    struct object **bucket = bucket_of(key);
    object->kind = kind;
    object->key = key;
    object->next = *bucket;
    *bucket = object;
}

static struct object *find(uint64_t key, unsigned kind) {
    struct object *object = *bucket_of(key);
    while (object != NULL && (object->key != key || object->kind != kind)) {
        object = object->next;
    }
    return object;
}

/* To use a handle of what is gone is undefined behaviour of the driver: here it ends the program. */
struct object *object_find(uint64_t key, enum object_kind kind) {
    struct object *found = find(key, kind);
    if (found == NULL && find(key, kind | STALE) != NULL) {
        fprintf(stderr, "cuda double: a stale handle, of a %s\n", kind == POOL ? "memory pool" : "context");
        abort();
    }
    return found;
}

int object_lives(const void *handle, enum object_kind kind) {
    return find((uint64_t)(uintptr_t)handle, kind) != NULL;
}

void object_retire(struct object *object) {
    object->kind |= STALE;
}

struct object *object_find_handle(const void *handle, enum object_kind kind) {
    return object_find((uint64_t)(uintptr_t)handle, kind);
}

void object_remove(struct object *object) {
    for (struct object **place = bucket_of(object->key); *place != NULL; place = &(*place)->next) {
        if (*place == object) {
            *place = object->next;
            return;
        }
    }
}

void objects_each(enum object_kind kind, void (*visit)(struct object *, void *), void *data) {
    for (uint32_t number = 0; number < BUCKETS; number++) {
        for (struct object *object = buckets[number], *next; object != NULL; object = next) {
            next = object->next;
            if (object->kind == kind) {
                visit(object, data);
            }
        }
    }
}

uint64_t address_take(uint64_t bytes, uint64_t alignment) {
    uint64_t address = round_up(next_address, alignment);
    next_address = address + round_up(bytes, 512);
    return address;
}

uint32_t address_take_narrow(uint64_t bytes) {
    if (bytes > UINT32_MAX - ALIGNMENT || next_narrow > UINT32_MAX - ALIGNMENT - bytes) {
        return 0;
    }
    uint32_t address = (uint32_t)next_narrow;
    next_narrow += round_up(bytes, 512);
    return address;
}
