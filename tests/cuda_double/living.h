/* Which process has a slot of the shared file, and whether it lives: for the CUDA and the NVML double. */
#ifndef CUDA_LIVING_H
#define CUDA_LIVING_H

#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "cuda_layout.h"

static inline struct flock cuda_slot_lock(uint64_t byte, short type) {
    return (struct flock){.l_type = type, .l_whence = SEEK_SET, .l_start = (off_t)(SIM_CUDA_LOCK_BASE + byte), .l_len = 1};
}

/* What tells this process from one with the same pid, elsewhere or later. */
static inline struct sim_cuda_slot cuda_slot_of_this_process(void) {
    struct sim_cuda_slot slot = {.state = 1, .pid = (uint32_t)getpid()};
    struct stat space;
    char text[1024];
    FILE *status = fopen("/proc/self/stat", "re");
    size_t length = status == NULL ? 0 : fread(text, 1, sizeof(text) - 1, status);
    unsigned long long ticks = 0;
    if (status != NULL) {
        fclose(status);
    }
    text[length] = '\0';
    const char *after_name = strrchr(text, ')');
    if (after_name != NULL) { /* the 22nd field */
        sscanf(after_name + 1, " %*c %*d %*d %*d %*d %*d %*u %*u %*u %*u %*u %*u %*u %*d %*d %*d %*d %*d %*d %llu", &ticks);
    }
    slot.started = ticks;
    slot.space = stat("/proc/self/ns/pid", &space) == 0 ? space.st_ino : 0;
    return slot;
}

/* The pid of a slot's process as this process sees it; 0: it is dead; UINT32_MAX: it lives where we see no pids. */
static inline uint32_t cuda_slot_holder(const struct sim_cuda_machine *machine, int file, uint32_t number) {
    const struct sim_cuda_slot *slot = &machine->slots[number];
    struct flock range = cuda_slot_lock(number, F_WRLCK);
    if (fcntl(file, F_GETLK, &range) == 0 && range.l_type != F_UNLCK) {
        return range.l_pid > 0 ? (uint32_t)range.l_pid : UINT32_MAX;
    }
    /* The kernel does not name our own locks: of a second copy of the library, or of the other double. */
    if (slot->pid == (uint32_t)getpid()) {
        struct sim_cuda_slot me = cuda_slot_of_this_process();
        return slot->space == me.space && slot->started == me.started ? me.pid : 0;
    }
    return 0;
}

#endif
