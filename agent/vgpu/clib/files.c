/* The limit file and the usage region: found, checked, mapped. Whatever is wrong with either refuses memory. */
#include "caps.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

enum { LOCK_BYTES = 4096 }; /* of a mapping that keeps a lock: any number would do */
/* Linux 3.15; the headers of glibc 2.17 do not have them. */
enum { GNA_OFD_GETLK = 36, GNA_OFD_SETLK = 37 };

struct gna_usage *gna_usage;
static struct gna_mutex lock;
static const uint8_t *limits;
static unsigned records;
static struct stat region;
static _Atomic int region_file = -1;
static char folder[PATH_MAX];
static _Atomic bool opened;
static struct kept {
    uint64_t seen[2];
    struct gna_limit limit;
    bool valid;
} kept[GNA_MAX_DEVICES];

/* To standard error, unless nobody takes it from there: the application is neither held up nor ended by SIGPIPE. */
static void say(const char *text, size_t length) {
    struct pollfd error = {.fd = STDERR_FILENO, .events = POLLOUT};
    sigset_t pipe, before, pending;
    sigemptyset(&pipe);
    sigaddset(&pipe, SIGPIPE);
    if (poll(&error, 1, 0) != 1 || pthread_sigmask(SIG_BLOCK, &pipe, &before)) {
        return;
    }
    sigpending(&pending);
    if (write(STDERR_FILENO, text, length) < 0 && errno == EPIPE && !sigismember(&pending, SIGPIPE)) {
        sigtimedwait(&pipe, NULL, &(struct timespec){0});
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
}

void gna_complain(const char *what, const char *cause, const char *remedy) {
    static _Atomic int complained;
    char text[PATH_MAX + 512];
    int self = getpid();
    if (atomic_exchange(&complained, self) != self) {
        int length = snprintf(text, sizeof(text), "gpu-node-agent: GPU memory is refused: %s%s: %s; %s\n", folder, what, cause, remedy);
        say(text, length < (int)sizeof(text) ? (size_t)length : sizeof(text) - 1);
    }
}

static bool damaged(const char *name, const char *cause) {
    gna_complain(name, cause, "tell your cluster's administrator, who finds more in docs/vgpu.md");
    return false;
}

static uint32_t crc32_of(const uint8_t *bytes, size_t count) {
    static const uint32_t nibble[16] = {
        0x00000000, 0x1db71064, 0x3b6e20c8, 0x26d930ac, 0x76dc4190, 0x6b6b51f4, 0x4db26158, 0x5005713c,
        0xedb88320, 0xf00f9344, 0xd6d6a3e8, 0xcb61b38c, 0x9b64c2b0, 0x86d3d2d4, 0xa00ae278, 0xbdbdf21c,
    };
    uint32_t crc = UINT32_MAX;
    for (size_t index = 0; index < count; index++) {
        crc = nibble[(crc ^ bytes[index]) & 15] ^ (crc >> 4);
        crc = nibble[(crc ^ (bytes[index] >> 4)) & 15] ^ (crc >> 4);
    }
    return ~crc;
}

static int open_in_folder(const char *name, int flags) {
    char path[PATH_MAX + 16];
    snprintf(path, sizeof(path), "%s%s", folder, name);
    int file = open(path, flags | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK);
    if (file >= 0 && file <= STDERR_FILENO) {
        /* The application closed its own, and what somebody writes to standard error must not land in the region. */
        int higher = fcntl(file, F_DUPFD_CLOEXEC, STDERR_FILENO + 1);
        int problem = errno;
        close(file);
        errno = problem;
        file = higher;
    }
    return file;
}

static bool header_sound(const struct gna_limits_header *header) {
    if (header->magic != GNA_LIMITS_MAGIC) {
        return damaged(GNA_LIMITS_NAME, "this is no limit file");
    }
    if (header->layout != GNA_LAYOUT) {
        return damaged(GNA_LIMITS_NAME, "its layout is not one that this library knows");
    }
    if (crc32_of((const uint8_t *)header, 508) != header->crc) {
        return damaged(GNA_LIMITS_NAME, "the checksum of its header is wrong");
    }
    if (header->device_count == 0 || header->device_count > GNA_MAX_DEVICES) {
        return damaged(GNA_LIMITS_NAME, "its number of GPUs is impossible");
    }
    return true;
}

static bool open_limits(void) {
    struct stat status;
    int file = open_in_folder(GNA_LIMITS_NAME, O_RDONLY);
    if (file < 0) {
        return damaged(GNA_LIMITS_NAME, strerror(errno));
    }
    bool sound = false;
    uid_t overflow = 65534; /* root of the node, in a user namespace that does not map it */
    if (fstat(file, &status) || !S_ISREG(status.st_mode) || status.st_size < (off_t)GNA_LIMITS_BYTES) {
        damaged(GNA_LIMITS_NAME, "it is shorter than a limit file");
    } else if ((status.st_uid != 0 && status.st_uid != overflow) || (status.st_mode & (S_IWGRP | S_IWOTH))) {
        damaged(GNA_LIMITS_NAME, "others than the agent may write it");
    } else {
        const uint8_t *mapped = mmap(NULL, GNA_LIMITS_BYTES, PROT_READ, MAP_SHARED, file, 0);
        if (mapped == MAP_FAILED) {
            damaged(GNA_LIMITS_NAME, strerror(errno));
        } else if (header_sound((const struct gna_limits_header *)mapped)) {
            limits = mapped;
            records = ((const struct gna_limits_header *)mapped)->device_count;
            sound = true;
        } else {
            munmap((void *)mapped, GNA_LIMITS_BYTES);
        }
    }
    close(file);
    return sound;
}

static bool usage_header_sound(const struct gna_usage_header *header) {
    if (header->magic != GNA_USAGE_MAGIC || header->slots != GNA_SLOTS || header->device_count < records) {
        return damaged(GNA_USAGE_NAME, "this is no usage region");
    }
    if (header->layout != GNA_LAYOUT) {
        return damaged(GNA_USAGE_NAME, "its layout is not one that this library knows");
    }
    return true;
}

static bool open_usage(void) {
    int file = open_in_folder(GNA_USAGE_NAME, O_RDWR);
    if (file < 0) {
        return damaged(GNA_USAGE_NAME, strerror(errno));
    }
    if (fstat(file, &region) || !S_ISREG(region.st_mode) || region.st_size < (off_t)GNA_USAGE_BYTES) {
        close(file);
        return damaged(GNA_USAGE_NAME, "it is shorter than a usage region");
    }
    struct gna_usage *mapped = mmap(NULL, GNA_USAGE_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (mapped == MAP_FAILED) {
        close(file);
        return damaged(GNA_USAGE_NAME, strerror(errno));
    }
    atomic_store(&region_file, file);
    if (!gna_usage_back(0, GNA_USAGE_DEVICES + records * GNA_DEVICE_BYTES) || !usage_header_sound(&mapped->header)) {
        munmap(mapped, GNA_USAGE_BYTES);
        close(file);
        atomic_store(&region_file, -1);
        return false;
    }
    gna_usage = mapped;
    return true;
}

bool gna_files_open(void) {
    if (atomic_load_explicit(&opened, memory_order_acquire)) {
        return true;
    }
    gna_enter(&lock);
    bool done = atomic_load(&opened);
    if (!done) {
        if (gna_own_folder(folder, sizeof(folder)) == NULL) {
            folder[0] = 0;
            gna_complain("the library's own folder", "the loader does not say where it is", "load it by a whole path");
        } else if (limits != NULL || open_limits()) {
            done = open_usage();
        }
        atomic_store_explicit(&opened, done, memory_order_release);
    }
    gna_leave(&lock);
    return done;
}

unsigned gna_records(void) {
    return records;
}

/* The file behind the mapping, opened again where the application closed every descriptor that it did not know. */
static int file_of_region(struct stat *now) {
    int file = atomic_load(&region_file);
    if (file >= 0 && !fstat(file, now) && now->st_ino == region.st_ino && now->st_dev == region.st_dev) {
        return file;
    }
    file = open_in_folder(GNA_USAGE_NAME, O_RDWR);
    if (file < 0 || fstat(file, now) || now->st_ino != region.st_ino || now->st_dev != region.st_dev) {
        if (file >= 0) {
            close(file);
        }
        return -1;
    }
    atomic_store(&region_file, file);
    return file;
}

bool gna_usage_sound(void) {
    struct stat now;
    if (file_of_region(&now) < 0 || now.st_size < (off_t)GNA_USAGE_BYTES) {
        return damaged(GNA_USAGE_NAME, "it was truncated or replaced");
    }
    return true;
}

bool gna_usage_back(size_t offset, size_t bytes) {
    struct stat now;
    int file = file_of_region(&now);
    if (file < 0) {
        return false;
    }
    /* Without room a mapped page would end the application with SIGBUS. Not posix_fallocate: where the file system cannot
     * do it that writes zeros itself, over what other processes count there. */
    int problem;
    do {
        problem = fallocate(file, 0, (off_t)offset, (off_t)bytes) ? errno : 0;
    } while (problem == EINTR); /* by a profiler's timer, say */
    return problem == 0 || problem == EOPNOTSUPP || problem == ENOSYS || problem == EINVAL ? true : damaged(GNA_USAGE_NAME, strerror(problem));
}

/* Of the open file description, which the mapping alone keeps: a process that closes all its descriptors holds on, and
 * its children, which do not get the mapping, never hold for it. */
void *gna_living_hold(unsigned slot) {
    struct flock held = {.l_type = F_RDLCK, .l_whence = SEEK_SET, .l_start = GNA_LIVING + slot, .l_len = 1};
    struct stat now;
    int file = open_in_folder(GNA_USAGE_NAME, O_RDWR);
    if (file < 0) {
        return NULL;
    }
    void *mapped = MAP_FAILED;
    if (!fstat(file, &now) && now.st_ino == region.st_ino && now.st_dev == region.st_dev && !fcntl(file, GNA_OFD_SETLK, &held)) {
        mapped = mmap(NULL, LOCK_BYTES, PROT_READ, MAP_SHARED, file, 0);
    }
    if (mapped != MAP_FAILED && madvise(mapped, LOCK_BYTES, MADV_DONTFORK)) {
        munmap(mapped, LOCK_BYTES);
        mapped = MAP_FAILED;
    }
    close(file);
    return mapped == MAP_FAILED ? NULL : mapped;
}

void gna_living_let_go(void *held) {
    munmap(held, LOCK_BYTES);
}

bool gna_living_held(unsigned slot) {
    struct flock asked = {.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = GNA_LIVING + slot, .l_len = 1};
    struct stat now;
    int file = file_of_region(&now);
    return file < 0 || fcntl(file, GNA_OFD_GETLK, &asked) || asked.l_type != F_UNLCK;
}

static bool copy_valid(unsigned record, unsigned number, struct gna_limit *copy) {
    memcpy(copy, limits + GNA_LIMITS_RECORDS + record * sizeof(struct gna_limit_record) + number * sizeof(*copy), sizeof(*copy));
    return copy->generation != 0 && crc32_of((const uint8_t *)copy, offsetof(struct gna_limit, crc)) == copy->crc;
}

bool gna_limit_of(unsigned record, struct gna_limit *limit) {
    const struct gna_limit_record *shared =
        (const struct gna_limit_record *)(limits + GNA_LIMITS_RECORDS + record * sizeof(struct gna_limit_record));
    gna_enter(&lock);
    struct kept *known = &kept[record];
    uint64_t now[2];
    for (unsigned number = 0; number < 2; number++) {
        now[number] = __atomic_load_n(&shared->copy[number].generation, __ATOMIC_RELAXED);
    }
    if (now[0] != known->seen[0] || now[1] != known->seen[1]) {
        struct gna_limit copy[2];
        bool valid[2] = {copy_valid(record, 0, &copy[0]), copy_valid(record, 1, &copy[1])};
        unsigned newest = valid[1] && (!valid[0] || copy[1].generation > copy[0].generation);
        if (valid[newest]) {
            known->limit = copy[newest];
            known->valid = true;
        }
        for (unsigned number = 0; number < 2; number++) {
            /* One that was not whole is looked at again. */
            known->seen[number] = valid[number] ? copy[number].generation : 0;
        }
    }
    bool valid = known->valid;
    *limit = known->limit;
    gna_leave(&lock);
    return valid || damaged(GNA_LIMITS_NAME, "both copies of a GPU's limits are damaged");
}

uint64_t gna_limit_generation(unsigned record) {
    const struct gna_limit_record *shared =
        (const struct gna_limit_record *)(limits + GNA_LIMITS_RECORDS + record * sizeof(struct gna_limit_record));
    return __atomic_load_n(&shared->copy[0].generation, __ATOMIC_ACQUIRE) + __atomic_load_n(&shared->copy[1].generation, __ATOMIC_ACQUIRE);
}

uint64_t gna_limit_newest(unsigned record) {
    const struct gna_limit_record *shared =
        (const struct gna_limit_record *)(limits + GNA_LIMITS_RECORDS + record * sizeof(struct gna_limit_record));
    uint64_t first = __atomic_load_n(&shared->copy[0].generation, __ATOMIC_ACQUIRE);
    uint64_t second = __atomic_load_n(&shared->copy[1].generation, __ATOMIC_ACQUIRE);
    return first > second ? first : second;
}

const struct gna_limits_gate *gna_limits_gate(void) {
    return gna_files_open() ? (const struct gna_limits_gate *)(limits + GNA_LIMITS_GATE) : NULL;
}

int gna_record_of_uuid(const void *uuid) {
    for (unsigned record = 0; record < records; record++) {
        struct gna_limit limit;
        if (gna_limit_of(record, &limit) && !memcmp(limit.uuid, uuid, GNA_UUID_BYTES)) {
            return (int)record;
        }
    }
    return -1;
}
