/* The two files that the agent and the library share, byte for byte. All integers are little endian and of fixed
 * width. A layout only ever grows: a field keeps its place and meaning, a new one takes reserved bytes (which are
 * zero until then), and GNA_LAYOUT is raised only when an old library could no longer work with a new file.
 *
 * Where they are: the library finds both in its own folder, as the loader was given it, under the names below. The
 * agent mounts the library (read-only), the limit file (read-only) and the usage region (writable) into one folder
 * of the container, all three or none. No environment variable and no other path is ever read.
 *
 * What is wrong with either file makes the library refuse GPU memory (CUDA_ERROR_OUT_OF_MEMORY) and say so once on
 * standard error; it never ends the application and never lets an allocation pass uncounted.
 */
#ifndef GNA_LAYOUT_H
#define GNA_LAYOUT_H

#include <pthread.h>
#include <stddef.h>
#include <stdint.h>

#define GNA_LIMITS_NAME "limits"
#define GNA_USAGE_NAME "usage"

#define GNA_LAYOUT 1u
#define GNA_MAX_DEVICES 16u
#define GNA_UUID_BYTES 16u

/* ---------------------------------------------------------------------------------------------------------------
 * The limit file: 8,192 bytes, a regular file that neither group nor others may write, mounted read-only.
 *
 *      0  header, 512 bytes, written once when the file is made
 *    512  16 records of 256 bytes, one per GPU that the container holds, in the first `device_count` of them
 *   4608  12 bytes, see struct gna_limits_gate
 *   4620  reserved, zero
 *
 * A record has two copies of what may change. To change it, the writer writes the copy with the LOWER generation in
 * full, by one write of 112 bytes in place (never a rename: the mount pins the inode), with a generation above the
 * other copy's and the checksum of its first 108 bytes. The reader takes the valid copy with the highest generation,
 * so a writer that dies halfway, or whose bytes arrive in any order, leaves the values of before in force. A copy
 * with generation 0 is not in use. A new file has copy 0 written and copy 1 all zero.
 * --------------------------------------------------------------------------------------------------------------- */
#define GNA_LIMITS_MAGIC UINT64_C(0x4c4d4c0041474e47) /* the bytes "GNGA\0LML" */
#define GNA_LIMITS_BYTES 8192u
#define GNA_LIMITS_RECORDS 512u
#define GNA_NO_LIMIT UINT64_MAX

struct gna_limits_header {
    uint64_t magic;         /*   0  GNA_LIMITS_MAGIC */
    uint32_t layout;        /*   8  GNA_LAYOUT: the reader refuses another one */
    uint32_t header_bytes;  /*  12  512 */
    uint32_t file_bytes;    /*  16  8192 */
    uint32_t device_count;  /*  20  records in use, 1 to 16 */
    char container[64];     /*  24  name of the container's folder, ended by a zero byte; for people */
    uint64_t created_ns;    /*  88  CLOCK_REALTIME; for people */
    uint8_t reserved[412];  /*  96 */
    uint32_t crc;           /* 508  CRC-32 (that of zlib) of bytes 0 to 507 */
};

#define GNA_FLAG_STRICT 1u /* an entry point that is newer than the library is refused, not passed through */

#define GNA_FLAG_COMPUTE 2u /* the container is held to core_share; 0 of it: nothing may be launched now */
#define GNA_BURST_US 100000u

struct gna_limit {
    uint64_t generation;     /*   0  1 or more, higher is newer */
    uint8_t uuid[16];        /*   8  of the GPU or MIG instance, as cuDeviceGetUuid_v2 gives it */
    uint64_t memory_bytes;   /*  24  the cap; 0 allows nothing; GNA_NO_LIMIT for none */
    uint64_t request_bytes;  /*  32  reserved for soft caps: the writer repeats the cap */
    uint64_t context_bytes;  /*  40  charged for each context; 0 for nothing */
    uint64_t unseen_bytes;   /*  48  what the agent measured on this GPU beyond the region's total; it counts as used */
    uint32_t core_share;     /*  56  compute in 1/100 %: 10000 is the whole GPU; held to with GNA_FLAG_COMPUTE */
    uint32_t burst_us;       /*  60  device time that may be used at once after idling; 0: GNA_BURST_US */
    uint32_t correction;     /*  64  in 1/65536: learned times are worth 1 / this much of the share; 0: 1 */
    uint32_t driver_armed;   /*  68  1: the driver enforces the memory cap as well */
    uint32_t priority;       /*  72  reserved */
    uint32_t sampling;       /*  76  reserved */
    uint32_t flags;          /*  80  GNA_FLAG_* */
    uint32_t rivals;         /*  84  other processes at work on this GPU at a time, on average, in 1/256, and 1; 0: not known */
    uint64_t forgiven_bytes; /*  88  charged, and by the driver's measure not there: as if the cap were higher */
    uint8_t reserved[12];    /*  96 */
    uint32_t crc;            /* 108  CRC-32 (that of zlib) of bytes 0 to 107 */
};

struct gna_limit_record {
    struct gna_limit copy[2]; /* 0 and 112 */
    uint8_t reserved[32];     /* 224 */
};

/* What a launch looks at: it stands outside of the copies, so that it costs one load. Written by itself, before a copy
 * that lays a share on and after one that takes the last off. */
#define GNA_LIMITS_GATE 4608u
struct gna_limits_gate {
    uint32_t compute; /* 4608  0: no GPU of the container has GNA_FLAG_COMPUTE */
    uint32_t changes; /* 4612  another number after each change, of which its futex is woken; without: seen within 100 ms */
    uint32_t beat;    /* 4616  another number every some seconds of a pause; 0: the agent is an older one, and keeps no beat */
};

/* ---------------------------------------------------------------------------------------------------------------
 * The usage region: 1 MiB, mode 0666, the container's own: its writers can harm that container alone, but all of it.
 * glibc links a robust mutex that is held to its neighbours by pointers in the mutex, and follows them when it is
 * unlocked: who writes there can have a process of another user of the container write to any of its own addresses. The
 * mode cannot be narrower, since the region is made before it is known which users the container has. The agent makes it as a sparse file (the library allocates the pages that it touches, at the container's
 * expense) and writes the header's first 32 bytes and GNA_LOCK_KIND (u32) at byte GNA_LOCK_KIND_OFFSET of the lock
 * in the header and in the block of every device in use. From then on it only ever reads it, by pread,
 * as hints: it never maps it (a truncated mapping ends the reader) and waits for no lock in it.
 *
 *        0  header, 4,096 bytes
 *     4096  16 device blocks of 4,096 bytes, in the order of the limit file's records
 *    69632  2,048 slots of 384 bytes, one per process; the last is shared by all processes that found none
 *   856064  8,192 members of 16 bytes: the processes that share the last slot
 *   987136  4,096 fingerprints of 8 bytes: memory that a process of this container exported
 *  1019904  4,096 numbers of 2 bytes: whose slot that process has
 *  1028096  reserved, zero
 * --------------------------------------------------------------------------------------------------------------- */
#define GNA_USAGE_MAGIC UINT64_C(0x4753550041474e47) /* the bytes "GNGA\0USG" */
#define GNA_USAGE_BYTES 1048576u
#define GNA_USAGE_DEVICES 4096u
#define GNA_USAGE_SLOTS 69632u
#define GNA_USAGE_MEMBERS 856064u
#define GNA_DEVICE_BYTES 4096u
#define GNA_SLOTS 2048u
#define GNA_SHARED_SLOT 2047u
#define GNA_MEMBERS 8192u
#define GNA_EXPORTS 4096u
/* Beyond the region's end: one byte for each slot, for read locks of open file descriptions (fcntl, F_OFD_SETLK). They are
 * held by the slot's process, and by any other that has memory open which that process exported. */
#define GNA_LIVING (INT64_C(1) << 40)
/* What pthread_mutex_init leaves in a robust, process-shared mutex of glibc at offset 16, all else being zero. */
#define GNA_LOCK_KIND 144u
#define GNA_LOCK_KIND_OFFSET 16u

struct gna_usage_header {
    uint64_t magic;          /*  0  GNA_USAGE_MAGIC */
    uint32_t layout;         /*  8  GNA_LAYOUT: the library refuses another one */
    uint32_t header_bytes;   /* 12  4096 */
    uint32_t file_bytes;     /* 16  1048576 */
    uint32_t device_count;   /* 20  as in the limit file */
    uint32_t slots;          /* 24  2048 */
    uint32_t slot_bytes;     /* 28  384 */
    uint8_t reserved_a[96];  /* 32 */
    union {                  /* 128 guards the claiming of slots; as `lock` below */
        pthread_mutex_t lock;
        uint8_t lock_bytes[128];
    };
    uint64_t swept_ns;       /* 256  CLOCK_BOOTTIME of the last search for dead processes */
    uint64_t attached;       /* 264  processes that ever claimed a slot */
    uint64_t newer;          /* 272  entry points handed out that are newer than the library */
    uint64_t used_slots;     /* 280  slots below this number have been in use; the shared one is not counted */
    uint64_t thorough_ns;    /* 288  CLOCK_BOOTTIME of the last one that looked for zombies and pids used again */
    char newer_name[64];     /* 296 the last of these, ended by a zero byte */
    uint8_t reserved_b[3736];
};

struct gna_usage_device {
    union {                  /*   0  glibc's robust, process-shared mutex: zero but for GNA_LOCK_KIND at byte 16 */
        pthread_mutex_t lock;
        uint8_t lock_bytes[128];
    };
    uint64_t total;          /* 128  bytes charged: the sum of `charged` of all slots for this device */
    uint64_t peak;           /* 136  the highest total ever */
    uint64_t refused;        /* 144  allocations refused */
    uint64_t repaired;       /* 152  times that a lock's holder had died and the total was added up again */
    uint8_t reserved_a[96];  /* 160 */
    uint64_t next_ns;        /* 256  CLOCK_MONOTONIC: when the share has caught up with all that was launched */
    uint64_t waits;          /* 264  launches that had to wait for it */
    uint64_t waited_ns;      /* 272  for how long, by threads */
    uint64_t unmeasured;     /* 280  processes that cannot measure launches, and let those go that they know nothing of */
    uint8_t reserved_b[3808];
};

/* GNA_SLOT_LEFT: its process has ended, and another one still has memory open that it exported. */
enum { GNA_SLOT_FREE = 0, GNA_SLOT_PROCESS = 1, GNA_SLOT_SHARED = 2, GNA_SLOT_LEFT = 3 };

struct gna_usage_slot_device {
    uint64_t charged; /* bytes */
    uint64_t context; /* of these, bytes charged for contexts */
};

struct gna_usage_slot {
    uint32_t pid;            /*  0  in the process's own PID namespace; 0 in the shared slot */
    uint32_t state;          /*  4  GNA_SLOT_* */
    uint64_t start;          /*  8  field 22 of /proc/<pid>/stat: distinguishes a pid that is used again */
    uint64_t namespace;      /* 16  inode of the PID namespace: another one's pids mean nothing here */
    uint64_t image;          /* 24  drawn by the kernel at each exec: a process that called exec lost its memory */
    uint64_t launches;       /* 32  kernels and graphs launched */
    uint32_t held;           /* 40  1: its processes hold a lock on the region at GNA_LIVING + number while they live */
    uint8_t reserved_a[4];   /* 44 */
    uint64_t unheld_ns;      /* 48  CLOCK_BOOTTIME of the first look that found the lock gone and the process there; 0: none */
    uint32_t exported[GNA_MAX_DEVICES]; /* 56  of what is charged, granules of 2 MiB that were exported by legacy handles */
    uint64_t movable;        /* 120  bytes charged for memory that the driver may keep on the host and bring back; with a pool of it: more than there is */
    struct gna_usage_slot_device device[GNA_MAX_DEVICES]; /* 128 */
};

struct gna_usage_member {
    uint32_t pid;   /* 0: free */
    uint32_t reserved;
    uint64_t start;
};

struct gna_usage {
    struct gna_usage_header header;
    struct gna_usage_device device[GNA_MAX_DEVICES];
    struct gna_usage_slot slot[GNA_SLOTS];
    struct gna_usage_member member[GNA_MEMBERS];
    uint64_t exported[GNA_EXPORTS]; /* FNV-1a of an opaque handle, at its remainder; overwritten in time */
    uint16_t exporter[GNA_EXPORTS]; /* the slot of the process that wrote the fingerprint at the same place */
    uint8_t reserved[20480];
};

#define GNA_AT(type, field, offset) _Static_assert(offsetof(type, field) == (offset), #type "." #field)
#define GNA_SIZE(type, bytes) _Static_assert(sizeof(type) == (bytes), "size of " #type)

GNA_SIZE(struct gna_limits_header, GNA_LIMITS_RECORDS);
GNA_AT(struct gna_limits_header, container, 24);
GNA_AT(struct gna_limits_header, created_ns, 88);
GNA_AT(struct gna_limits_header, crc, 508);
GNA_SIZE(struct gna_limit, 112);
GNA_AT(struct gna_limit, memory_bytes, 24);
GNA_AT(struct gna_limit, core_share, 56);
GNA_AT(struct gna_limit, flags, 80);
GNA_AT(struct gna_limit, crc, 108);
GNA_SIZE(struct gna_limit_record, 256);
GNA_SIZE(struct gna_usage_header, GNA_USAGE_DEVICES);
GNA_AT(struct gna_usage_header, lock, 128);
GNA_AT(struct gna_usage_header, swept_ns, 256);
GNA_AT(struct gna_usage_header, used_slots, 280);
GNA_AT(struct gna_usage_header, newer_name, 296);
GNA_SIZE(struct gna_usage_device, GNA_DEVICE_BYTES);
GNA_AT(struct gna_usage_device, total, 128);
GNA_AT(struct gna_usage_device, next_ns, 256);
GNA_AT(struct gna_usage_device, waited_ns, 272);
GNA_AT(struct gna_usage_device, unmeasured, 280);
GNA_SIZE(struct gna_usage_slot, 384);
GNA_AT(struct gna_usage_slot, unheld_ns, 48);
GNA_AT(struct gna_usage_slot, exported, 56);
GNA_AT(struct gna_usage_slot, movable, 120);
GNA_AT(struct gna_usage_slot, device, 128);
GNA_AT(struct gna_usage, device, GNA_USAGE_DEVICES);
GNA_AT(struct gna_usage, slot, GNA_USAGE_SLOTS);
GNA_AT(struct gna_usage, member, GNA_USAGE_MEMBERS);
GNA_AT(struct gna_usage, exported, 987136);
GNA_AT(struct gna_usage, exporter, 1019904);
GNA_SIZE(struct gna_usage, GNA_USAGE_BYTES);
_Static_assert(sizeof(pthread_mutex_t) <= 128, "room for the lock");

#endif
